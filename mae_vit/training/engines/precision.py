"""Precisions of the forward and backward pass; parameters, updates and losses stay float32."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from torch import nn

from mae_vit.core.batch import Batch
from mae_vit.objectives.objective import ObjectiveOutput, Task

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
