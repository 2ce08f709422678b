"""The training cost of pretrained weights."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError

from mae_vit.models.encoder_file import EncoderInfo, read_info, read_metadata


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
        images, more = self.images_seen, other.images_seen
        flops, more_flops = self.flops, other.flops
        return Cost(
            None if images is None or more is None else images + more,
            None if flops is None or more_flops is None else flops + more_flops,
        )


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
