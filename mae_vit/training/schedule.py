"""The learning rate as a pure function of the step."""

from __future__ import annotations

import math


def cosine_rate(
    step: int, *, peak: float, warmup_steps: int, total_steps: int, min_rate: float = 0.0
) -> float:
    """Linear warm-up from 0, then half a cosine down to `min_rate` (MAE Sec. A.1).

    Args:
        step: optimizer steps done so far, 0 <= step < total_steps.
        peak: rate at the end of the warm-up.
        warmup_steps: steps of warm-up; 0 for none.
        total_steps: steps of the run.
        min_rate: where the cosine ends.
    """
    if step < warmup_steps:
        return peak * step / warmup_steps
    progress = (step - warmup_steps) / max(1, total_steps - warmup_steps)
    return min_rate + (peak - min_rate) * 0.5 * (1 + math.cos(math.pi * progress))
