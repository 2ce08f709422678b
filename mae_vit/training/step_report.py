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

    Attributes:
        packed: float32 (6 + 2 * names,), on the device, once it is reduced.
    """

    packed: Tensor

    def __init__(self, engine: Engine, *, stop: bool, save_due: bool) -> None:
        self._engine, self._stop, self._save_due = engine, stop, save_due
        self.damaged = 0
        self._loss = torch.zeros((), device=engine.device)
        self._values: dict[str, Tensor] = {}  # (sum, count)

    def add(self, output: ObjectiveOutput, *, micro_batches: int) -> None:
        """Adds one micro-batch of the step."""
        self._loss = self._loss + output.loss.detach().float() / micro_batches
        for name, value in output.values.items():
            self._values[name] = self._values.get(name, 0.0) + torch.stack([part.float() for part in value])

    def reduce(self, result: StepResult) -> StepReport:
        """Sums over ranks in one collective, and adds the result of the step."""
        flags = (self._on_device(flag) for flag in (self._stop, self.damaged, self._save_due))
        parts = (part for name in self.names for part in self._values[name])
        sums = self._engine.all_reduce_sum(torch.stack([self._loss, *flags, *parts]))
        # The gradient norm is already global, and all ranks skip the same fp16 steps.
        skipped = self._on_device(result.skipped)
        head = (sums[0], result.grad_norm.float(), sums[1], skipped, sums[2], sums[3])
        self.packed = torch.stack([*head, *sums[4:]])
        return self

    def _on_device(self, value: int) -> Tensor:
        """Makes a scalar on the device; `torch.tensor` would copy it from the host and wait for all earlier work."""
        return torch.full((), float(value), device=self._engine.device)

    @property
    def names(self) -> list[str]:
        """Names of the objective's other values, in their order in `packed`."""
        return sorted(self._values)

    def read(self, packed: list[float]) -> StepValues:
        """Unpacks the numbers of `packed` on the host."""
        loss, grad_norm, stop, skipped, damaged, save_due, *values = packed
        pairs = zip(self.names, values[::2], values[1::2], strict=True)
        means = {name: finite_or_none(total / max(count, 1.0)) for name, total, count in pairs}
        loss /= self._engine.ranks.world_size
        return StepValues(loss, grad_norm, stop > 0, skipped > 0, int(damaged), save_due > 0, means)


class ReportReader:
    """Copies each step's report to the host without blocking; reads it when the next is pushed, or on request.

    On a GPU the copy goes to pinned memory and records an event. One step later it is complete, so reading does not
    wait for the device.
    """

    def __init__(self) -> None:
        self._pending: tuple[StepReport, Tensor, torch.cuda.Event | None] | None = None

    def push(self, report: StepReport) -> StepValues | None:
        """Queues a step's report; returns the previous step's, or None at first."""
        previous, values = self.flush(), report.packed
        if values.is_cuda:
            host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            host.copy_(values, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
            self._pending = (report, host, event)
        else:
            self._pending = (report, values.detach().clone(), None)
        return previous

    def flush(self) -> StepValues | None:
        """Waits for the last report and returns it; None if there is none."""
        if self._pending is None:
            return None
        (report, host, event), self._pending = self._pending, None
        if event is not None:
            event.synchronize()
        return report.read(host.tolist())


def finite_or_none(value: float) -> float | None:
    """Replaces inf and NaN, which JSON lacks, by None; only steps that fp16 skipped have them."""
    return value if math.isfinite(value) else None
