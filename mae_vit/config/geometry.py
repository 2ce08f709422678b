"""Turns a config's `model` section into the geometry of an encoder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from mae_vit.config.schema import ModelSection
from mae_vit.core.bands import Bands
from mae_vit.core.errors import InputError
from mae_vit.core.preprocessing import UNCHANGED, Preprocessing
from mae_vit.models.encoder_file import EncoderInfo
from mae_vit.models.sizes import SIZES


def resolve_encoder(
    model: ModelSection,
    *,
    mean: Sequence[float],
    std: Sequence[float],
    objective: str,
    bands: Bands | None = None,
    preprocessing: Preprocessing = UNCHANGED,
) -> EncoderInfo:
    """Resolves the geometry of the encoder.

    Args:
        model: the config's section.
        mean: per-channel mean of the pixels (in 0..1).
        std: per-channel standard deviation of the pixels (in 0..1).
        objective: name of what trains the encoder.
        bands: what the images' raw values mean; None for 8 bits.
        preprocessing: what `prepare` did to the images.

    Raises:
        InputError: if the number of heads does not divide the width, or the width does not fit the positions.
    """
    size = SIZES[model.name].with_changes(model.embed_dim, model.depth, model.num_heads)
    if size.embed_dim % size.num_heads:
        raise InputError(
            f"model.embed_dim={size.embed_dim} is not divisible by model.num_heads={size.num_heads}"
        )
    if model.pos_embed == "sincos" and size.embed_dim % 4:
        raise InputError(f'model.embed_dim={size.embed_dim} must be divisible by 4 for pos_embed="sincos"')
    return EncoderInfo(
        size=model.name,
        img_size=model.image_hw,
        patch_size=model.patch_size,
        in_chans=model.channels,
        **asdict(size),
        mlp_ratio=model.mlp_ratio,
        pos_embed=model.pos_embed,
        class_tokens=model.class_tokens,
        mean=mean,
        std=std,
        objective=objective,
        step=0,
        bands=bands,
        preprocessing=preprocessing,
    )
