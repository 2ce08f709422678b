"""What is measured: attention (maps, rollout, distance, heads), positions, components of patch features.

Shapes: B batch, C channels, H heads, T tokens, n images, N patches, D width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from timm.layers import Attention
from torch import Tensor
from torch.nn import Module

from mae_vit.models.encoders.base import Encoder
from mae_vit.models.masking import squared_distances


@torch.no_grad()
def attention_weights(encoder: Encoder, images: Tensor) -> list[Tensor]:
    """Computes softmax(q k^T / sqrt(d)) of all blocks (ViT App. A, eq. 6): float32 (B, H, T, T) each.

    Rows are queries and add up to 1. Images (B, C, H, W) are normalized. Fused attention does not return weights, so
    hooks catch the inputs of the blocks, from which weights are computed. The encoder keeps its mode.
    """
    layers = [block.attn for block in encoder.blocks]
    caught: list[Tensor] = []
    handles = [
        layer.register_forward_pre_hook(lambda module, inputs: caught.append(inputs[0])) for layer in layers
    ]
    training = encoder.training
    encoder.eval()
    try:
        encoder.forward_features(images)
    finally:
        for handle in handles:
            handle.remove()
        encoder.train(training)
    return [_weights(layer, tokens) for layer, tokens in zip(layers, caught, strict=True)]


def _weights(attention: Module, tokens: Tensor) -> Tensor:
    assert isinstance(attention, Attention)
    batch, length, width = tokens.shape
    heads = attention.num_heads
    parts = attention.qkv(tokens).reshape(batch, length, 3, heads, width // heads).permute(2, 0, 3, 1, 4)
    queries, keys = attention.q_norm(parts[0]).float(), attention.k_norm(parts[1]).float()
    return (queries @ keys.transpose(-2, -1) * attention.scale).softmax(dim=-1)


def attention_maps(weights: Tensor, grid_size: tuple[int, int], *, query: str = "cls") -> Tensor:
    """Arranges attention to the patches as maps: (B, H, T, T) -> (B, H, rows, columns).

    Query "cls" averages over class tokens, "mean" over all patches, as the read-out does. The rest of the sum of 1 is
    attention to class tokens.
    """
    count = count_class_tokens(weights, grid_size)
    asked = weights[:, :, :count] if query == "cls" else weights[:, :, count:]
    return asked.mean(dim=2)[:, :, count:].unflatten(-1, grid_size)


def count_class_tokens(weights: Tensor, grid_size: tuple[int, int]) -> int:
    """Returns the number of class tokens in weights (..., T, T); they come first."""
    return weights.shape[-1] - grid_size[0] * grid_size[1]


def rollout(weights: Sequence[Tensor]) -> Tensor:
    """Follows attention through all blocks (Abnar & Zuidema, arXiv 2005.00928, Sec. 3).

    It averages heads, adds the residual connection (0.5 A + 0.5 I), normalizes rows to 1, and multiplies the blocks
    from the first (as in ViT Sec. 4.5): (B, H, T, T) each -> (B, T, T), how much of each input token is in each
    output token.
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
    """Measures how far heads look: distance between patch centers, weighted by attention (ViT Sec. 4.5, App. D.7).

    Only attention between patches counts, normalized to 1: class tokens have no place in the image.
    (B, H, T, T) -> (H,) in pixels, the mean over images and queries.
    """
    distances = squared_distances(grid_size, weights.device).sqrt() * patch_size
    count = count_class_tokens(weights, grid_size)
    between = weights[:, :, count:, count:]
    between = between / between.sum(dim=-1, keepdim=True).clamp(min=torch.finfo(between.dtype).tiny)
    return (between * distances).sum(dim=-1).mean(dim=(0, 2))


def head_entropy(weights: Tensor) -> Tensor:
    """Measures how widely heads look: the entropy of a query's attention over all T tokens, (B, H, T, T) -> (H,).

    In nats, the mean over images and queries: 0 for a single token, log T for uniform attention.
    """
    return -(weights * weights.clamp(min=torch.finfo(weights.dtype).tiny).log()).sum(dim=-1).mean(dim=(0, 2))


@torch.no_grad()
def position_similarity(pos_embed: Tensor, class_tokens: int = 1) -> Tensor:
    """Computes the cosine similarity of all pairs of position embeddings (ViT Sec. 4.5, Fig. 7 center).

    (1, k + N, D), the k rows of class tokens first, -> float32 (N, N).
    """
    directions = F.normalize(pos_embed[0, class_tokens:].float(), dim=-1)
    return directions @ directions.T


def feature_components(features: Tensor, count: int = 3) -> tuple[Tensor, Tensor]:
    """Projects patch features of several images onto joint principal components (DINOv2, arXiv 2304.07193, Fig. 1).

    (n, N, D) -> float32 (n, N, count), the largest component first; and each one's share of the variance (count,). The
    largest weight of a component is made positive, so that equal features give equal pictures.
    """
    flat = features.detach().double().cpu().flatten(0, 1)
    centered = flat - flat.mean(dim=0)
    values, vectors = torch.linalg.eigh(centered.T @ centered)
    directions = vectors[:, -count:].flip(1)
    directions = directions * directions.gather(0, directions.abs().argmax(dim=0, keepdim=True)).sign()
    shares = values[-count:].flip(0) / values.sum().clamp(min=torch.finfo(torch.float64).tiny)
    return (centered @ directions).float().unflatten(0, features.shape[:2]), shares.float()
