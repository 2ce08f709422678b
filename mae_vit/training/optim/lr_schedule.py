"""The learning rate as a pure function of the step: a warm-up, then half a cosine."""

from __future__ import annotations

import math


def lr_at(step: int, *, peak_lr: float, warmup_steps: int, total_steps: int, min_lr: float = 0.0) -> float:
    """Returns the learning rate: a linear warm-up from 0 to `peak_lr`, then half a cosine to `min_lr` (MAE Sec. A.1).

    Args:
        step: optimizer steps done so far, 0 <= step < total_steps.
        peak_lr: learning rate at the end of the warm-up.
        warmup_steps: steps of warm-up; 0 for none.
        total_steps: steps of the run, including the warm-up.
        min_lr: learning rate at the end of the run.
    """
    if step < warmup_steps:
        return peak_lr * step / warmup_steps
    progress = max(0, step - warmup_steps) / max(1, total_steps - warmup_steps)
    return min_lr + (peak_lr - min_lr) * (0.5 * (1 + math.cos(math.pi * progress)))
