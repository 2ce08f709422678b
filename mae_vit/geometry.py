"""From a config's `model` section to the geometry of an encoder."""

from __future__ import annotations

from collections.abc import Sequence

from mae_vit.config import ModelSection
from mae_vit.encoder import SIZES
from mae_vit.errors import InputError
from mae_vit.weights import EncoderInfo


def resolve_encoder(
    model: ModelSection, *, mean: Sequence[float], std: Sequence[float], objective: str
) -> EncoderInfo:
    """Resolves the geometry of the encoder.

    Raises:
        InputError: if width and heads do not fit.
    """
    size = SIZES[model.name]
    embed_dim, num_heads = model.embed_dim or size.embed_dim, model.num_heads or size.num_heads
    if embed_dim % num_heads:
        raise InputError(f"model.embed_dim={embed_dim} is not divisible by model.num_heads={num_heads}")
    if model.pos_embed == "sincos" and embed_dim % 4:
        raise InputError(f'model.embed_dim={embed_dim} must be divisible by 4 for pos_embed="sincos"')
    return EncoderInfo(
        size=model.name,
        img_size=model.image_hw,
        patch_size=model.patch_size,
        in_chans=model.in_chans,
        embed_dim=embed_dim,
        depth=model.depth or size.depth,
        num_heads=num_heads,
        mlp_ratio=model.mlp_ratio,
        pos_embed=model.pos_embed,
        mean=mean,
        std=std,
        objective=objective,
        step=0,
    )
