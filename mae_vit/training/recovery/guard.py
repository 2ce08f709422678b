"""Judges every step by its loss and gradient norm. All ranks reach the same result."""

from __future__ import annotations

import math
import statistics
from collections import deque

from mae_vit.config.schema import GuardSection
from mae_vit.runtime.failures import BadStep
from mae_vit.training.engines.state import LossHistory

_WINDOW = 256
# Fewer losses give no reliable estimate of their spread.
_ENOUGH = 128
# Standard deviation over median absolute deviation, for a normal distribution.
_SIGMA_PER_MAD = 1.4826


class Guard:
    """Detects steps that are not finite, and losses that jump and stay high.

    A loss jumps if it is `spike_sigmas` robust standard deviations above the median of the last
    256; `spike_steps` jumps in a row are a spike. A single jump is a hard batch.
    """

    def __init__(self, options: GuardSection, course: LossHistory) -> None:
        """Continues from the losses in `course`."""
        self._options, self._skipped = options, course.skipped
        self._losses = deque(course.losses, maxlen=_WINDOW)
        self._streak = course.streak

    @property
    def course(self) -> LossHistory:
        """Returns the losses for the checkpoint."""
        return LossHistory(self._skipped, tuple(self._losses), self._streak)

    @property
    def no_suspects(self) -> bool:
        """Whether every step since the last good one was judged good."""
        return self._streak == 0

    def check(self, step: int, loss: float, grad_norm: float) -> None:
        """Judges a step.

        Args:
            step: its number, from 1.
            loss: mean over the global batch.
            grad_norm: global, before clipping.

        Raises:
            BadStep: if it, or the steps up to it, are bad.
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
