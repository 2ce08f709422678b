"""Where an encoder looks: the attention weights of a block.

Shapes: B images, H heads, N patches, T = 1 + N tokens, [CLS] first.
"""

from __future__ import annotations

import torch
from timm.layers import Attention
from torch import Tensor

from mae_vit.encoder import ViTEncoder


@torch.no_grad()
def attention_weights(encoder: ViTEncoder, images: Tensor, *, block: int = -1) -> Tensor:
    """Computes softmax(q k^T / sqrt(d)) of one block (ViT App. A, eq. 6).

    The block's input is caught on its way; weights are computed beside the forward pass,
    which fused attention never spells out.

    Args:
        encoder: in evaluation mode afterwards as before.
        images: (B, C, H, W), normalized.
        block: which; -1 is the last.

    Returns:
        float32 (B, H, T, T): rows are queries and add up to 1.
    """
    attention = encoder.blocks[block].attn
    assert isinstance(attention, Attention)
    caught: list[Tensor] = []
    handle = attention.register_forward_pre_hook(lambda module, inputs: caught.append(inputs[0]))
    training = encoder.training
    encoder.eval()
    try:
        encoder.forward_features(images)
    finally:
        handle.remove()
        encoder.train(training)
    (tokens,) = caught
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
