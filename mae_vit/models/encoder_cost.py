"""What pretrained weights have cost."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mae_vit.models.encoder_file import read_info


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


def cost_of_weights(start: str | None) -> Cost:
    """Reads the cost of weights, with all that their pretraining began from (`model.init`).

    Args:
        start: a run folder, or a value of `--ckpt`; None for random weights, which cost nothing.

    Returns:
        The cost. Our encoders record it; files of others do not.
    """
    if start is None:
        return Cost(0, 0.0)
    path = Path(start)
    info = read_info(path / "encoder.safetensors" if path.is_dir() else path)
    if info is None:
        return Cost(None, None)
    own = Cost(info.images_seen, info.flops)
    return own if info.before is None else own + Cost(**info.before)
