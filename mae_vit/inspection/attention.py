"""Where an encoder looks: the attention weights of a block.

Shapes: B images, H heads, N patches, T = 1 + N tokens, [CLS] first.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from timm.layers import Attention
from torch import Tensor
from torch.nn import Module

from mae_vit.encoder import ViTEncoder


@torch.no_grad()
def attention_weights(
    encoder: ViTEncoder, images: Tensor, *, blocks: Sequence[int] | None = None
) -> list[Tensor]:
    """Computes softmax(q k^T / sqrt(d)) of blocks (ViT App. A, eq. 6).

    The blocks' inputs are caught on their way; weights are computed beside the forward pass,
    which fused attention never spells out.

    Args:
        encoder: in evaluation mode afterwards as before.
        images: (B, C, H, W), normalized.
        blocks: which; all by default, -1 is the last.

    Returns:
        For each block float32 (B, H, T, T): rows are queries and add up to 1.
    """
    layers = [
        encoder.blocks[block].attn for block in (range(len(encoder.blocks)) if blocks is None else blocks)
    ]
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
    # Inputs come in the order of the blocks, whichever was asked for first.
    order = sorted(range(len(layers)), key=lambda place: _depth(encoder, layers[place]))
    found = {place: _weights(layers[place], tokens) for place, tokens in zip(order, caught, strict=True)}
    return [found[place] for place in range(len(layers))]


def _depth(encoder: ViTEncoder, layer: Module) -> int:
    return next(depth for depth, block in enumerate(encoder.blocks) if block.attn is layer)


def _weights(attention: Module, tokens: Tensor) -> Tensor:
    assert isinstance(attention, Attention)
    batch, length, width = tokens.shape
    heads = attention.num_heads
    parts = attention.qkv(tokens).reshape(batch, length, 3, heads, width // heads).permute(2, 0, 3, 1, 4)
    queries, keys = attention.q_norm(parts[0]).float(), attention.k_norm(parts[1]).float()
    return (queries @ keys.transpose(-2, -1) * attention.scale).softmax(dim=-1)


def looks(weights: Tensor, grid_size: tuple[int, int], *, query: str = "cls") -> Tensor:
    """Lays attention to the patches over the image.

    Args:
        weights: (B, H, T, T), from `attention_weights`.
        grid_size: rows and columns of patches.
        query: "cls", who asks; or "mean", the average over all patches, where the read-out
            is their mean and [CLS] is not read.

    Returns:
        (B, H, rows, columns): what is left of 1 goes to [CLS].
    """
    asked = weights[:, :, 0] if query == "cls" else weights[:, :, 1:].mean(dim=2)
    return asked[:, :, 1:].unflatten(-1, grid_size)
