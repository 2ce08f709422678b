"""Reads and writes encoder files: safetensors with timm's keys, and the metadata needed to use them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save as save_tensors

from mae_vit.models.geometry import Geometry
from mae_vit.models.vit import ViTEncoder

# Key of our entry in a safetensors file's metadata; its value is JSON.
_KEY = "mae_vit"


@dataclass(frozen=True)
class EncoderInfo(Geometry):
    """The metadata of an encoder file. It holds no time, path or run name, so equal runs give equal bytes.

    Attributes:
        mean: per-channel mean of the pixels (in 0..1) that the network was trained on.
        std: per-channel standard deviation of these pixels.
        objective: name of the pretraining objective.
        step: optimizer steps of pretraining.
        labels: the labels it was trained on, in the form of `mae_vit.weights.seen_labels.SeenLabels`; None
            if none (older files never have them).
        images_seen: images of these steps; each view counts. None if unknown.
        flops: model FLOPs of these steps; None if unknown.
    """

    mean: Sequence[float]
    std: Sequence[float]
    objective: str
    step: int
    labels: dict[str, Any] | None = None
    images_seen: int | None = None
    flops: float | None = None


def encoder_bytes(encoder: ViTEncoder, info: EncoderInfo) -> bytes:
    """Returns the content of an `encoder.safetensors`: timm's keys, float32, metadata."""
    tensors = {
        name: value.detach().float().cpu().contiguous() for name, value in encoder.state_dict().items()
    }
    return save_tensors(tensors, metadata=to_metadata(asdict(info)))


def to_metadata(values: Mapping[str, Any]) -> dict[str, str]:
    """Packs facts as the metadata of a safetensors file."""
    return {_KEY: json.dumps(values, sort_keys=True)}


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
        return EncoderInfo(**{**known, "img_size": tuple(metadata["img_size"])})
    except (OSError, SafetensorError, ValueError, KeyError, TypeError):
        return None
