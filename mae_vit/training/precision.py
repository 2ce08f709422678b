"""Precisions of the forward and backward pass; parameters, updates and losses stay float32."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import nn

from mae_vit.batch import Batch
from mae_vit.objectives.base import ObjectiveOutput, Task

Precision = Literal["fp32", "bf16", "fp16"]

AUTOCAST_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Autocast(nn.Module):
    """Runs an objective in the run's precision."""

    def __init__(self, objective: Task, device: torch.device, precision: Precision) -> None:
        """Wraps `objective`."""
        super().__init__()
        self.objective = objective
        self._device_type = device.type
        self._dtype = AUTOCAST_DTYPES.get(precision)
        # What `Module.compile` leaves, where it was called.
        self._compiled = objective._compiled_call_impl is not None

    def forward(self, batch: Batch) -> ObjectiveOutput:
        """Computes the loss under autocast; losses themselves are float32."""
        with self.context():
            # Here, outside of what is compiled.
            return self.objective(replace(batch, keys=batch.keys.for_compiled()) if self._compiled else batch)

    def context(self) -> torch.autocast:
        """The autocast of this run's precision, for evaluation."""
        return torch.autocast(self._device_type, dtype=self._dtype, enabled=self._dtype is not None)


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
