"""Reads and writes encoder files: safetensors with timm's keys, and the metadata needed to use them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save as save_tensors

from mae_vit.core.bands import RGB8, Bands
from mae_vit.core.errors import InputError
from mae_vit.core.preprocessing import UNCHANGED, Preprocessing
from mae_vit.models.encoders.base import Encoder
from mae_vit.models.geometry import Geometry, ViTGeometry, geometry_from
from mae_vit.models.sizes import Pool

# Key of our entry in a safetensors file's metadata; its value is JSON.
_KEY = "mae_vit"


@dataclass(frozen=True)
class EncoderInfo:
    """The metadata of an encoder file. It holds no time, path or run name, so equal runs give equal bytes.

    Attributes:
        geometry: architecture of the encoder.
        mean: mean of each channel, of the pixels (in 0..1) that the network was trained on.
        std: standard deviation of each channel, of these pixels.
        objective: name of the pretraining objective.
        step: optimizer steps of pretraining.
        labels: the labels it was trained on, in the form of `mae_vit.weights.seen_labels.SeenLabels`; None
            if none (older files never have them).
        images_seen: images of these steps; each view counts. None if unknown.
        flops: model FLOPs of these steps; None if unknown.
        before: `images_seen` and `flops` of the weights that pretraining began from (`model.init`), with all before
            them; each None if unknown. None if it began from random weights (older files never have it).
        bands: what the raw values of images mean, in whose unit scale mean and std are; None for 8 bits.
        preprocessing: what `prepare` did to the images before training read them.
        pool: what reads a feature from the tokens. A file states it only where it is not the mean.
    """

    geometry: Geometry
    mean: Sequence[float]
    std: Sequence[float]
    objective: str
    step: int = 0
    labels: dict[str, Any] | None = None
    images_seen: int | None = None
    flops: float | None = None
    before: dict[str, Any] | None = None
    bands: Bands = RGB8
    preprocessing: Preprocessing = UNCHANGED
    pool: Pool = "mean"

    @property
    def img_size(self) -> tuple[int, int]:
        """(H, W) of its images in pixels."""
        return self.geometry.img_size

    @property
    def in_chans(self) -> int:
        """C of its images."""
        return self.geometry.in_chans

    @property
    def vit(self) -> ViTGeometry:
        """The geometry of a Vision Transformer of the papers; see `check_vit`."""
        self.check_vit()
        assert isinstance(self.geometry, ViTGeometry)
        return self.geometry

    def check_vit(self) -> None:
        """Refuses encoders of other families, for commands that know Vision Transformers of the papers alone.

        Raises:
            InputError: naming the family.
        """
        if not isinstance(self.geometry, ViTGeometry):
            timm = "; its encoder.safetensors has the names of timm's network"
            raise InputError(
                f"the encoder is {self.geometry.describe()} (model.family={self.geometry.family}): this takes "
                f"model.family=vit alone{timm if self.geometry.family == 'network' else ''}"
            )

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields as plain data; those that say nothing new are left out."""
        own = {item.name: getattr(self, item.name) for item in fields(self) if item.name != "geometry"}
        values = {**self.geometry.to_dict(), **own}
        del values["bands"], values["before"], values["preprocessing"]
        if self.pool == "mean":
            del values["pool"]
        before = {} if self.before is None else {"before": self.before}
        return {**values, **before, **self.bands.to_entry(), **self.preprocessing.to_entry()}


def raw_normalization(info: EncoderInfo) -> tuple[list[float], list[float]]:
    """Returns mean and std of raw values; of 8-bit images those of pixels in 0..1."""
    if info.bands.photographs:
        return list(info.mean), list(info.std)
    ends = list(zip(info.bands.low, info.bands.high, strict=True))
    mean = [low + (high - low) * value for (low, high), value in zip(ends, info.mean, strict=True)]
    return mean, [(high - low) * value for (low, high), value in zip(ends, info.std, strict=True)]


def encoder_bytes(encoder: Encoder, info: EncoderInfo) -> bytes:
    """Returns the content of an `encoder.safetensors`: timm's keys, float32, metadata."""
    tensors = {
        name: (value.float() if value.is_floating_point() else value).detach().cpu().contiguous()
        for name, value in encoder.weights().items()
    }
    return save_tensors(tensors, metadata=to_metadata(info.to_dict()))


def to_metadata(values: Mapping[str, Any]) -> dict[str, str]:
    """Packs facts as the metadata of a safetensors file.

    Files of one class token do not state it: their bytes are those of versions without the option.
    """
    stated = {key: value for key, value in values.items() if (key, value) != ("class_tokens", 1)}
    return {_KEY: json.dumps(stated, sort_keys=True)}


def read_metadata(path: Path) -> dict[str, Any]:
    """Reads our metadata from a safetensors file; empty if another program wrote it.

    Raises:
        OSError: if it cannot be read.
        SafetensorError: if it is no safetensors file.
        ValueError: if our metadata is not JSON.
    """
    with safe_open(path, framework="pt") as file:
        metadata: dict[str, Any] = json.loads((file.metadata() or {}).get(_KEY, "{}"))
    return metadata


def read_info(path: Path) -> EncoderInfo | None:
    """Reads the metadata of an `encoder.safetensors` or of a classifier; None if the file is not ours."""
    try:
        metadata = read_metadata(path)
        # Classifiers and exports tell more, such as their classes.
        known = {field.name: metadata[field.name] for field in fields(EncoderInfo) if field.name in metadata}
        geometry = geometry_from(metadata)
        if geometry is None:
            return None
        changed = {
            "geometry": geometry,
            "bands": Bands.of_entry(metadata),
            "preprocessing": Preprocessing.of_entry(metadata),
        }
        return EncoderInfo(**{**known, **changed})
    except (OSError, SafetensorError, ValueError, KeyError, TypeError):
        return None
