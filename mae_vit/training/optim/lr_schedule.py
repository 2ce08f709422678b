"""The learning rate as a pure function of the step: a warm-up, then one of three schedules."""

from __future__ import annotations

import math
from typing import Literal

ScheduleName = Literal["cosine", "linear", "wsd"]


def lr_at(
    step: int,
    *,
    schedule: ScheduleName,
    peak_lr: float,
    warmup_steps: int,
    total_steps: int,
    min_lr: float = 0.0,
    decay_steps: int = 0,
) -> float:
    """Returns the learning rate: a linear warm-up from 0 to `peak_lr`, then a decay to `min_lr`.

    Args:
        step: optimizer steps done so far, 0 <= step < total_steps.
        schedule: "cosine" is half a cosine (MAE Sec. A.1). "linear" is linear (ViT Sec. 4.1). "wsd"
            (warm-up, stable, decay) is constant until the last `decay_steps`, then linear
            (arXiv 2404.06395; the linear decay: arXiv 2405.18392).
        peak_lr: learning rate at the end of the warm-up.
        warmup_steps: steps of warm-up; 0 for none.
        total_steps: steps of the run.
        min_lr: learning rate at the end of the decay.
        decay_steps: steps of decay, for "wsd" only.
    """
    if step < warmup_steps:
        return peak_lr * step / warmup_steps
    begin = total_steps - decay_steps if schedule == "wsd" else warmup_steps
    progress = max(0, step - begin) / max(1, total_steps - begin)
    left = 0.5 * (1 + math.cos(math.pi * progress)) if schedule == "cosine" else 1 - progress
    return min_lr + (peak_lr - min_lr) * left
