"""Attention maps: rollout, distance, heads."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from timm.layers import Attention
from torch import Tensor
from torch.nn import Module

from mae_vit.models.encoders.base import Encoder
from mae_vit.models.masking import squared_distances


@torch.no_grad()
def attention_weights(encoder: Encoder, images: Tensor) -> list[Tensor]:
    """Computes softmax(q k^T / sqrt(d)) of all blocks (ViT App. A, eq. 6): for each float32 (B, H, T, T).

    Rows are queries and add up to 1. The blocks' inputs are caught on their way; weights are computed beside the
    forward pass of normalized images (B, C, H, W), which fused attention never spells out. The encoder keeps its mode.
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
    """Lays attention to the patches over the image: (B, H, T, T) -> (B, H, rows, columns).

    The query is "cls", the average over class tokens, or "mean", that over all patches, where the read-out is their
    mean. The rest of the sum of 1 is attention to class tokens.
    """
    count = count_class_tokens(weights, grid_size)
    asked = weights[:, :, :count] if query == "cls" else weights[:, :, count:]
    return asked.mean(dim=2)[:, :, count:].unflatten(-1, grid_size)


def count_class_tokens(weights: Tensor, grid_size: tuple[int, int]) -> int:
    """Returns how many of the T tokens of weights (..., T, T) are no patches; they come first."""
    return weights.shape[-1] - grid_size[0] * grid_size[1]


def rollout(weights: Sequence[Tensor]) -> Tensor:
    """Follows attention through all blocks (Abnar & Zuidema, arXiv 2005.00928, Sec. 3).

    The mean over heads, half of it the residual connection, 0.5 A + 0.5 I, rows adding up to 1, multiplied up from the
    first block (as ViT Sec. 4.5 uses it): (B, H, T, T) each -> (B, T, T), how much of each input token is in each
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

    Attention from patches to patches counts: class tokens have no place in the image, so the rest is normalized to 1.
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
