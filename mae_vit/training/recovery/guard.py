"""Checks the loss and gradient norm of every step. All ranks reach the same result."""

from __future__ import annotations

import math
import statistics
from collections import deque

from mae_vit.config.schema import GuardSection
from mae_vit.runtime.failures import BadStep
from mae_vit.training.engines.state import LossHistory

_WINDOW = 256
# Fewer losses give no reliable estimate of the spread.
_ENOUGH = 128
# For a normal distribution: standard deviation = 1.4826 x median absolute deviation.
_SIGMA_PER_MAD = 1.4826


class Guard:
    """Detects steps that are not finite, and losses that jump and stay high.

    A loss jumps if it is more than `spike_sigmas` robust standard deviations above the median of the
    last 256 losses. `spike_steps` jumps in a row are a spike. A single jump is only a hard batch.
    """

    def __init__(self, options: GuardSection, course: LossHistory) -> None:
        """Continues from the losses in `course`."""
        self._options, self._skipped = options, course.skipped
        self._losses = deque(course.losses, maxlen=_WINDOW)
        self._streak = course.streak

    @property
    def course(self) -> LossHistory:
        """The loss history for the checkpoint."""
        return LossHistory(self._skipped, tuple(self._losses), self._streak)

    @property
    def no_suspects(self) -> bool:
        """Whether the latest step was good. If it jumped, it may be the start of a spike."""
        return self._streak == 0

    def check(self, step: int, loss: float, grad_norm: float) -> None:
        """Checks a step, counted from 1: mean loss over the global batch, global gradient norm before clipping.

        Raises:
            BadStep: if the step is not finite, or if it completes a spike.
        """
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            reason = f"is not finite (loss {loss}, gradient norm {grad_norm})"
            raise BadStep(step, reason, loss, grad_norm, tuple(self._losses))
        bound = self._bound()
        if bound is None or loss <= bound:
            self._streak = 0
            self._losses.append(loss)
            return
        self._streak += 1
        if self._streak >= self._options.spike_steps:
            first = step - self._streak + 1
            reason = f"begins a spike (loss {loss:.4g} after {self._streak} steps above {bound:.4g})"
            raise BadStep(first, reason, loss, grad_norm, tuple(self._losses))

    def _bound(self) -> float | None:
        if self._options.spike_sigmas is None or len(self._losses) < _ENOUGH:
            return None
        middle = statistics.median(self._losses)
        mad = statistics.median(abs(loss - middle) for loss in self._losses)
        return middle + self._options.spike_sigmas * _SIGMA_PER_MAD * mad
