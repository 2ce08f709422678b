"""What pretrained weights have cost."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from mae_vit.models.encoder_file import EncoderInfo, read_info, read_metadata


@dataclass(frozen=True)
class Cost:
    """The cost of training. A value is None if it is unknown.

    Attributes:
        images_seen: images seen; each view counts.
        flops: model FLOPs.
    """

    images_seen: int | None
    flops: float | None

    def __add__(self, other: Cost) -> Cost:
        images, more = self.images_seen, other.images_seen
        flops, more_flops = self.flops, other.flops
        return Cost(
            None if images is None or more is None else images + more,
            None if flops is None or more_flops is None else flops + more_flops,
        )


UNKNOWN = Cost(None, None)


def cost_of_info(info: EncoderInfo | None) -> Cost:
    """Returns the cost that an encoder file records, with all that its pretraining began from (`model.init`)."""
    if info is None:
        return UNKNOWN
    own = _cost_of({"images_seen": info.images_seen, "flops": info.flops})
    return own if info.before is None else own + _cost_of(info.before)


def cost_of_weights(start: str | None) -> Cost:
    """Reads the cost of weights, with all that their pretraining began from (`model.init`).

    Args:
        start: a run folder, or a value of `--ckpt`; None for random weights, which cost nothing.

    Returns:
        The cost. Our encoders record it; classifiers and files of others do not.
    """
    if start is None:
        return Cost(0, 0.0)
    path = Path(start)
    file = path / "encoder.safetensors" if path.is_dir() else path
    with suppress(OSError, SafetensorError, ValueError):
        if not {"classes", "segments"} & read_metadata(file).keys():
            return cost_of_info(read_info(file))
    return UNKNOWN


def _cost_of(values: Any) -> Cost:
    """Reads a cost from plain data of a file, which may hold anything."""
    if not isinstance(values, Mapping):
        return UNKNOWN
    images, flops = (
        value
        if isinstance(value := values.get(name), int | float) and math.isfinite(value) and value >= 0
        else None
        for name in ("images_seen", "flops")
    )
    return Cost(None if images is None else int(images), None if flops is None else float(flops))
