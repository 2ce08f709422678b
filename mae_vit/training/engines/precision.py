"""The precision of the forward and backward pass. Parameters, updates and losses stay float32."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from torch import nn

from mae_vit.core.batch import Batch
from mae_vit.objectives.objective import ObjectiveOutput, Task

Precision = Literal["fp32", "bf16", "fp16"]
AUTOCAST_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(device: torch.device, precision: Precision) -> torch.autocast:
    """Returns a context of a precision, for a forward pass without `Autocast`."""
    dtype = AUTOCAST_DTYPES.get(precision)
    return torch.autocast(device.type, dtype=dtype, enabled=dtype is not None)


class Autocast(nn.Module):
    """Runs an objective in the run's precision."""

    def __init__(self, objective: Task, device: torch.device, precision: Precision) -> None:
        """Wraps `objective`."""
        super().__init__()
        self.objective = objective
        self._device_type = device.type
        self._dtype = AUTOCAST_DTYPES.get(precision)
        # `Module.compile` sets this attribute.
        self._compiled = objective._compiled_call_impl is not None

    def forward(self, batch: Batch) -> ObjectiveOutput:
        """Computes the loss under autocast; losses themselves are float32."""
        with self.context():
            # Convert the keys here, outside the compiled function.
            return self.objective(replace(batch, keys=batch.keys.for_compiled()) if self._compiled else batch)

    def context(self) -> torch.autocast:
        """Returns the autocast context of this run's precision."""
        return torch.autocast(self._device_type, dtype=self._dtype, enabled=self._dtype is not None)
