"""The loss scale of fp16."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass
class LossScale:
    """Dynamic loss scaling for fp16, in which gradients below 6e-8 would vanish.

    The loss is multiplied by `scale`, and gradients are divided by it. If gradients overflow, the
    step is skipped and the scale is halved. After `growth_interval` good steps in a row the scale
    doubles. It is always a power of two, so scaling never rounds. The defaults are those of
    torch.amp.GradScaler, which supports neither sharded gradients nor a lowest scale.

    Attributes:
        scale: the factor, a power of two from `LOWEST` to `HIGHEST`.
        good_steps: steps since the scale last changed.
        skipped_steps: steps skipped in the whole run.
        growth_interval: good steps before the scale doubles.
    """

    scale: float = 65536.0
    good_steps: int = 0
    skipped_steps: int = 0
    growth_interval: int = 2000

    # If gradients overflow without scaling, a lower scale does not help.
    LOWEST: ClassVar[float] = 1.0
    # A larger scale gains nothing: 2^24 lifts the smallest float16 to 1.
    HIGHEST: ClassVar[float] = 2.0**24

    def update(self, *, overflow: bool) -> bool:
        """Updates the scale after a backward pass; returns whether to skip the step.

        An overflow at the lowest scale is not skipped. It is a bad step, which the guard treats as in
        any other precision.
        """
        if overflow:
            if self.scale <= self.LOWEST:
                return False
            self.scale = max(self.LOWEST, self.scale / 2)
            self.good_steps = 0
            self.skipped_steps += 1
            return True
        self.good_steps += 1
        if self.good_steps >= self.growth_interval:
            self.scale = min(self.HIGHEST, self.scale * 2)
            self.good_steps = 0
        return False
