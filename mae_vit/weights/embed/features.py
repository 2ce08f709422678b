"""Features of images, batch by batch."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from mae_vit.core.errors import InputError
from mae_vit.weights.embed.crop_loader import BatchPart, load_pieces
from mae_vit.weights.embed.images import Images
from mae_vit.weights.encoder import PretrainedEncoder

Precision = Literal["fp32", "bf16"]
FeatureType = Literal["float32", "float16"]


@dataclass(frozen=True)
class Settings:
    """How features are computed.

    Attributes:
        device: that the encoder runs on.
        batch_size: images at a time.
        workers: data processes.
        precision: of the forward pass; bf16 is autocast over float32 weights.
        dtype: of the features that are kept.
    """

    device: torch.device
    batch_size: int = 64
    workers: int = 0
    precision: Precision = "fp32"
    dtype: FeatureType = "float32"


@dataclass(frozen=True)
class Features:
    """Of images first..stop-1.

    Attributes:
        first: number of the first image.
        stop: one past the last.
        images: int64 (K,), numbers of those that are whole.
        features: (K, D) of the settings' dtype.
        broken: number and reason of the others.
    """

    first: int
    stop: int
    images: np.ndarray
    features: np.ndarray
    broken: list[tuple[int, str]]


def compute_features(
    encoder: PretrainedEncoder, images: Images, settings: Settings, *, first: int = 0
) -> Generator[Features, None, None]:
    """Yields the features of all images from `first` on, a batch each.

    A batch holds the images of `batch_size` numbers in a row, whoever decodes them: where
    runs begin at its borders, they give the same numbers to the last bit.

    Args:
        encoder: on the settings' device.
        images: in order.
        settings: of the computation.
        first: number of the first image.

    Raises:
        InputError: if features are not finite, or a data process died.
    """
    batches = load_pieces(
        images,
        first=first,
        batch_size=settings.batch_size,
        channels=encoder.info.in_chans,
        img_size=encoder.info.img_size,
        workers=settings.workers,
        pin_memory=settings.device.type == "cuda",
    )
    # A GPU is at work on a batch while this process sees to the one before.
    before: tuple[list[BatchPart], Tensor] | None = None
    for pieces in batches:
        launched = (pieces, _encode(encoder, pieces, settings))
        if before is not None:
            yield _gather(*before, images, settings)
        before = launched
    if before is not None:
        yield _gather(*before, images, settings)


@torch.inference_mode()
def _encode(encoder: PretrainedEncoder, pieces: list[BatchPart], settings: Settings) -> Tensor:
    """Returns float32 (K, D), on the device and perhaps not computed yet."""
    pixels = torch.cat([piece.pixels.to(settings.device, non_blocking=True) for piece in pieces])
    if not len(pixels):
        return torch.zeros(0, encoder.embed_dim, device=settings.device)
    enabled = settings.precision == "bf16"
    with torch.autocast(settings.device.type, dtype=torch.bfloat16, enabled=enabled):
        features = encoder(encoder.normalize(pixels))
    return features.float()


def _gather(pieces: list[BatchPart], features: Tensor, images: Images, settings: Settings) -> Features:
    with np.errstate(over="ignore"):  # told of below
        kept = features.cpu().numpy().astype(settings.dtype)
    whole = np.concatenate([piece.whole for piece in pieces])
    finite = np.isfinite(kept).all(axis=1)
    if not finite.all():
        worst = images.path(int(whole[finite.argmin()]))
        of_type = " or --dtype float32" if settings.dtype == "float16" else ""
        raise InputError(
            f"the features of {worst} are not finite: look at the weights, or try --precision fp32{of_type}"
        )
    broken = [(int(image), str(reason)) for piece in pieces for image, reason in piece.broken]
    return Features(pieces[0].first, pieces[-1].first + pieces[-1].count, whole, kept, broken)
