"""Reads and writes encoder files: safetensors with timm's keys, and the metadata needed to use them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save as save_tensors

from mae_vit.core.bands import RGB8, Bands
from mae_vit.core.errors import InputError
from mae_vit.core.preprocessing import UNCHANGED, Preprocessing
from mae_vit.models.encoders.base import Encoder
from mae_vit.models.geometry import Geometry, ViTGeometry, geometry_from
from mae_vit.models.sizes import TIMM_PREFIX, Pool

# Key of our entry in a safetensors file's metadata; its value is JSON.
_KEY = "mae_vit"


@dataclass(frozen=True)
class EncoderInfo:
    """The metadata of an encoder file. It holds no time, path or run name, so equal runs give equal bytes.

    Attributes:
        geometry: architecture of the encoder.
        mean: mean of each channel of the training images, in 0..1.
        std: standard deviation of each channel of the training images, in 0..1.
        objective: name of the pretraining objective.
        step: optimizer steps of pretraining.
        labels: labels of the training data, as `mae_vit.weights.seen_labels.SeenLabels`; None without any.
        images_seen: number of images in these steps; each view counts. None if unknown.
        flops: model FLOPs of these steps; None if unknown.
        before: total `images_seen` and `flops` of the initial weights (`model.init`), each None if unknown; None
            for random initial weights.
        bands: meaning of the raw values; mean and std refer to its 0..1 scale.
        preprocessing: changes that `prepare` made to the images.
        pool: how a feature is pooled from the tokens; files state it only if it is not the mean.
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
        """(H, W) of the images in pixels."""
        return self.geometry.img_size

    @property
    def in_chans(self) -> int:
        """C of the images."""
        return self.geometry.in_chans

    @property
    def vit(self) -> ViTGeometry:
        """The geometry of a plain Vision Transformer; raises InputError for other families."""
        if isinstance(self.geometry, ViTGeometry):
            return self.geometry
        of_timm = self.geometry.describe().startswith(TIMM_PREFIX)
        raise InputError(
            f"the encoder is {self.geometry.describe()} (model.family={self.geometry.family}), but only "
            f"model.family=vit is supported here{'; its file of weights loads into that network' * of_timm}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields as plain data, without some that have their default."""
        own = {item.name: getattr(self, item.name) for item in fields(self) if item.name != "geometry"}
        values = {**self.geometry.to_dict(), **own}
        del values["bands"], values["before"], values["preprocessing"]
        if self.pool == "mean":
            del values["pool"]
        before = {} if self.before is None else {"before": self.before}
        return {**values, **before, **self.bands.to_entry(), **self.preprocessing.to_entry()}


def raw_normalization(info: EncoderInfo) -> tuple[list[float], list[float]]:
    """Returns mean and std of raw values; for 8-bit images those of pixels in 0..1."""
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

    It omits `class_tokens=1`, so that bytes equal those of versions without the option.
    """
    stated = {key: value for key, value in values.items() if (key, value) != ("class_tokens", 1)}
    return {_KEY: json.dumps(stated, sort_keys=True)}


def read_metadata(path: Path) -> dict[str, Any]:
    """Reads our metadata from a safetensors file; empty if another program wrote it.

    Raises OSError if it cannot be read. Raises SafetensorError if it is not a safetensors file. Raises ValueError if
    our metadata is not JSON.
    """
    with safe_open(path, framework="pt") as file:
        metadata: dict[str, Any] = json.loads((file.metadata() or {}).get(_KEY, "{}"))
    return metadata


def read_info(path: Path) -> EncoderInfo | None:
    """Reads the metadata of an `encoder.safetensors` or of a classifier; None if the file is not ours."""
    try:
        metadata = read_metadata(path)
        # Classifiers and exports have more keys, such as their classes.
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


@dataclass(frozen=True)
class Cost:
    """The cost of training. A value is None if it is unknown.

    Attributes:
        images_seen: number of images seen; each view counts.
        flops: model FLOPs.
    """

    images_seen: int | None
    flops: float | None

    def __add__(self, other: Cost) -> Cost:
        pairs = zip(astuple(self), astuple(other), strict=True)
        return Cost(*(None if None in pair else sum(pair) for pair in pairs))


UNKNOWN = Cost(None, None)


def cost_of_info(info: EncoderInfo | None) -> Cost:
    """Returns the cost that an encoder file records, including the weights it was initialized from (`model.init`)."""
    if info is None:
        return UNKNOWN
    own = Cost(info.images_seen, info.flops)
    return own if info.before is None else own + Cost(info.before["images_seen"], info.before["flops"])


def cost_of_weights(weights: str | None) -> Cost:
    """Reads the cost of weights, including the weights they were initialized from (`model.init`).

    `weights` is a run folder or a value of `--ckpt`; None is random weights, which cost nothing. Classifiers and
    third-party files record no cost.
    """
    if weights is None:
        return Cost(0, 0.0)
    path = Path(weights)
    file = path / "encoder.safetensors" if path.is_dir() else path
    with suppress(OSError, SafetensorError, ValueError):
        if not {"classes", "segments"} & read_metadata(file).keys():
            return cost_of_info(read_info(file))
    return UNKNOWN
