"""What attention weights say in sum: where information comes from, how far, how widely.

Shapes: L blocks, B images, H heads, N patches, T = 1 + N tokens, [CLS] first.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mae_vit.masking import squared_distances


def rollout(weights: Sequence[Tensor]) -> Tensor:
    """Follows attention through all blocks (Abnar & Zuidema, arXiv 2005.00928, Sec. 3).

    The mean over heads, half of it the residual connection, 0.5 A + 0.5 I, rows adding up
    to 1, multiplied up from the first block (as ViT Sec. 4.5 uses it).

    Args:
        weights: of each block in order, (B, H, T, T).

    Returns:
        (B, T, T): how much of each input token is in each output token; rows add up to 1.
    """
    joint: Tensor | None = None
    for block in weights:
        mixed = block.mean(dim=1)
        mixed = 0.5 * mixed + 0.5 * torch.eye(mixed.shape[-1], device=mixed.device)
        mixed = mixed / mixed.sum(dim=-1, keepdim=True)
        joint = mixed if joint is None else mixed @ joint
    if joint is None:
        raise ValueError("rollout needs the weights of at least one block")
    return joint


def mean_attention_distance(weights: Tensor, grid_size: tuple[int, int], patch_size: int) -> Tensor:
    """How far heads look: distance between patch centers, weighted by attention (ViT Sec. 4.5, App. D.7).

    Of patches to patches: what goes to [CLS] has no place, and the rest is taken as the whole.

    Args:
        weights: (B, H, T, T).
        grid_size: rows and columns of patches.
        patch_size: P.

    Returns:
        (H,) in pixels, the mean over images and queries.
    """
    distances = squared_distances(grid_size, weights.device).sqrt() * patch_size
    between = weights[:, :, 1:, 1:]
    between = between / between.sum(dim=-1, keepdim=True).clamp(min=torch.finfo(between.dtype).tiny)
    return (between * distances).sum(dim=-1).mean(dim=(0, 2))


def head_entropy(weights: Tensor) -> Tensor:
    """How widely heads look: the entropy of a query's attention, over all T tokens.

    Args:
        weights: (B, H, T, T).

    Returns:
        (H,) in nats, the mean over images and queries: 0 for one token alone, log T for all alike.
    """
    return -(weights * weights.clamp(min=torch.finfo(weights.dtype).tiny).log()).sum(dim=-1).mean(dim=(0, 2))
