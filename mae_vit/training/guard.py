"""Judges every step by its loss and gradient norm, alike on all ranks."""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass, field

from mae_vit.config import GuardSection
from mae_vit.skipping import Skipped

_WINDOW = 256
# Fewer losses say little about how far they scatter.
_ENOUGH = 128
# Of a normal distribution: standard deviation over median absolute deviation.
_SIGMA_PER_MAD = 1.4826


@dataclass(frozen=True)
class Course:
    """What a run has met so far; checkpoints keep it, so that one that resumes decides alike.

    Attributes:
        skipped: steps of the data order that are left out.
        losses: of the latest good steps.
        streak: how many steps in a row have just leapt.
    """

    skipped: Skipped = ()
    losses: tuple[float, ...] = ()
    streak: int = 0


@dataclass
class BadStep(RuntimeError):
    """A step after which the run cannot go on as it is; all ranks raise it together.

    Attributes:
        step: its number, from 1; of a spike, where it began.
        reason: for people.
        loss: of the step that was judged.
        grad_norm: of the same.
        losses: of the good steps before it.
    """

    step: int
    reason: str
    loss: float | None = None
    grad_norm: float | None = None
    losses: tuple[float, ...] = field(default=(), repr=False)

    def __str__(self) -> str:
        return f"step {self.step} {self.reason}"


class Guard:
    """Finds steps that are not finite, and losses that leap and stay high.

    A loss leaps if it is `spike_sigmas` robust standard deviations above the median of the last
    256; `spike_steps` in a row are a spike. One alone is a hard batch.
    """

    def __init__(self, options: GuardSection, course: Course) -> None:
        """Goes on where `course` stands."""
        self._options, self._skipped = options, course.skipped
        self._losses = deque(course.losses, maxlen=_WINDOW)
        self._streak = course.streak

    @property
    def course(self) -> Course:
        """What a checkpoint is to keep."""
        return Course(self._skipped, tuple(self._losses), self._streak)

    @property
    def quiet(self) -> bool:
        """Whether no step since the last good one is in doubt."""
        return self._streak == 0

    def judge(self, step: int, loss: float, grad_norm: float) -> None:
        """Takes in a step.

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
