"""The loss scale of fp16."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass
class LossScale:
    """Dynamic loss scaling for fp16, whose gradients would vanish below 6e-8.

    The loss is multiplied by `scale`, gradients divided by it again. A step whose
    gradients overflow is skipped and halves the scale; after `growth_interval` good ones
    in a row it doubles. Values are torch.amp.GradScaler's; that class knows neither
    sharded gradients nor a lowest scale, so the rule is ours. Always a power of two:
    scaling rounds nothing.

    Attributes:
        scale: of the loss.
        good_steps: steps since the scale last changed.
        skipped_steps: steps skipped in the whole run.
        growth_interval: good steps before the scale doubles.
    """

    scale: float = 65536.0
    good_steps: int = 0
    skipped_steps: int = 0
    growth_interval: int = 2000

    # Gradients that overflow unscaled are no matter of scaling.
    LOWEST: ClassVar[float] = 1.0
    # Beyond it nothing is gained: 2^24 lifts the smallest float16 to 1.
    HIGHEST: ClassVar[float] = 2.0**24

    def update(self, *, overflow: bool) -> bool:
        """Takes in whether a step's gradients overflowed; returns whether to skip the step.

        An overflow at the lowest scale is not skipped: it is a bad step, to be treated
        as in any other precision.
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
