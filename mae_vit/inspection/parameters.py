"""Pictures of an encoder's parameters: positions and filters.

Shapes: N patches, D width, C channels, P patch size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


@torch.no_grad()
def position_similarity(pos_embed: Tensor, class_tokens: int = 1) -> Tensor:
    """Cosine similarity of all pairs of position embeddings (ViT Sec. 4.5, Fig. 7 center).

    Args:
        pos_embed: (1, k + N, D).
        class_tokens: k; their rows come first and are left out.

    Returns:
        float32 (N, N).
    """
    directions = F.normalize(pos_embed[0, class_tokens:].float(), dim=-1)
    return directions @ directions.T


def center_patch(grid_size: tuple[int, int]) -> int:
    """The patch right below the middle: number 36 of 8 x 8, in rows."""
    return grid_size[0] // 2 * grid_size[1] + grid_size[1] // 2


@torch.no_grad()
def filter_components(weight: Tensor, count: int = 28) -> tuple[Tensor, Tensor]:
    """Principal components of the patch projection's filters (ViT Sec. 4.5, Fig. 7 left).

    Args:
        weight: (D, C, P, P).
        count: how many, at most; the paper shows 28.

    Returns:
        Components (k, C, P, P), each of norm 1, and the share of the variance that each explains (k,).
    """
    filters = weight.detach().float().cpu().flatten(1)
    centered = filters - filters.mean(dim=0)
    _, scales, directions = torch.linalg.svd(centered, full_matrices=False)
    variance = scales.square()
    k = min(count, len(directions))
    total = variance.sum().clamp(min=torch.finfo(variance.dtype).tiny)
    return directions[:k].unflatten(1, weight.shape[1:]), variance[:k] / total
