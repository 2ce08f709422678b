"""The report of a step: reduced over ranks on the device, and read by the host one step late."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from mae_vit.objectives.objective import ObjectiveOutput
from mae_vit.training.engines.base import Engine, StepResult


@dataclass
class StepTimer:
    """Times a logging window, without evaluation and saving."""

    images: int = 0
    train_s: float = 0.0
    wait_s: float = 0.0

    def count(self, images: int, *, since: float) -> None:
        """Adds images, and the seconds since `since`, a value of `time.monotonic`."""
        self.images += images
        self.train_s += time.monotonic() - since

    def rates(self) -> dict[str, float]:
        """Returns images per second, and the fraction of the host's time spent waiting for data."""
        seconds = max(self.train_s, 1e-9)
        return {"images_per_s": self.images / seconds, "data_wait_frac": self.wait_s / seconds}


@dataclass(frozen=True)
class StepValues:
    """A step's report on the host, equal on all ranks.

    Attributes:
        skipped: whether fp16 gradients overflowed, so that the step changed nothing.
        damaged: number of samples newly known to be damaged.
        save_due: whether rank 0 requests a save.
    """

    loss: float
    grad_norm: float
    stop: bool
    skipped: bool
    damaged: int
    save_due: bool
    means: dict[str, float | None]


class StepReport:
    """Collects a step's report on the device, over micro-batches and then over ranks.

    On a GPU it is copied to pinned memory without blocking. One step later the copy is complete, so reading does not
    wait for the device.
    """

    def __init__(self, engine: Engine, *, stop: bool, save_due: bool) -> None:
        self._engine, self._stop, self._save_due = engine, stop, save_due
        self.damaged = 0
        self._loss = torch.zeros((), device=engine.device)
        self._values: dict[str, Tensor] = {}  # (sum, count)
        self._copied: torch.cuda.Event | None = None

    def add(self, output: ObjectiveOutput, *, micro_batches: int) -> None:
        """Adds one micro-batch of the step."""
        self._loss = self._loss + output.loss.detach().float() / micro_batches
        for name, value in output.values.items():
            self._values[name] = self._values.get(name, 0.0) + torch.stack([part.float() for part in value])

    def reduce(self, result: StepResult) -> StepReport:
        """Sums over ranks in one collective, adds the result of the step, and starts the copy to the host."""
        flags = (self._on_device(flag) for flag in (self._stop, self.damaged, self._save_due))
        parts = (part for name in sorted(self._values) for part in self._values[name])
        sums = self._engine.all_reduce_sum(torch.stack([self._loss, *flags, *parts]))
        # The gradient norm is already global, and all ranks skip the same fp16 steps.
        skipped = self._on_device(result.skipped)
        head = (sums[0], result.grad_norm.float(), sums[1], skipped, sums[2], sums[3])
        self._packed = torch.stack([*head, *sums[4:]])  # float32 (6 + 2 * values,)
        if self._packed.is_cuda:
            host = torch.empty(self._packed.shape, dtype=self._packed.dtype, pin_memory=True)
            self._packed = host.copy_(self._packed, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()
        return self

    def _on_device(self, value: int) -> Tensor:
        """Makes a scalar on the device; `torch.tensor` would copy it from the host and wait for all earlier work."""
        return torch.full((), float(value), device=self._engine.device)

    def read(self) -> StepValues:
        """Waits for the copy and unpacks its numbers."""
        if self._copied is not None:
            self._copied.synchronize()
        loss, grad_norm, stop, skipped, damaged, save_due, *values = self._packed.tolist()
        pairs = zip(sorted(self._values), values[::2], values[1::2], strict=True)
        means = {name: finite_or_none(total / max(count, 1.0)) for name, total, count in pairs}
        loss /= self._engine.ranks.world_size
        return StepValues(loss, grad_norm, stop > 0, skipped > 0, int(damaged), save_due > 0, means)


def finite_or_none(value: float) -> float | None:
    """Replaces inf and NaN, which JSON lacks, by None; only steps that fp16 skipped have them."""
    return value if math.isfinite(value) else None
