"""The cost of pretrained weights before fine-tuning."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mae_vit.models.encoder_file import read_info
from mae_vit.training.outputs.run_folder import RunFolder


@dataclass(frozen=True)
class Cost:
    """The cost of a run. A value is None if it is unknown.

    Attributes:
        images: images seen; each view counts.
        flops: model FLOPs.
        seconds: seconds of training on the machine that trained.
    """

    images: int | None
    flops: float | None
    seconds: float | None


def cost_of_run(summary: dict[str, Any]) -> Cost:
    """Reads a run's `summary.json`."""
    flops, steps = summary.get("flops_per_step"), summary.get("steps")
    done = None if flops is None or steps is None else flops * steps
    return Cost(summary.get("samples"), done, summary.get("wall_s"))


def cost_of_start(start: str | None) -> Cost:
    """Reads the cost from a value of `--ckpt`. Our encoders record it; timm's and official files do not."""
    if start is None:
        return Cost(0, 0.0, 0.0)
    path = Path(start)
    info = read_info(RunFolder(path).encoder if path.is_dir() else path)
    return Cost(None, None, None) if info is None else Cost(info.images_seen, info.flops, None)
