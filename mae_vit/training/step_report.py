"""Device values read by the host one step late, so that no step waits for them."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mae_vit.training.callbacks import Hooks
from mae_vit.training.recovery.guard import Guard


class LateReader:
    """Copies small tensors to the host without blocking; each is read at the next push.

    On a GPU the copy goes to pinned memory behind an event; by the time of the next
    step it is done, and reading costs no synchronization.
    """

    def __init__(self) -> None:
        """Starts empty."""
        self._pending: tuple[Tensor, torch.cuda.Event | None] | None = None

    def push(self, values: Tensor) -> list[float] | None:
        """Hands in this step's values (n,); returns the previous step's, None at first."""
        previous = self.flush()
        if values.is_cuda:
            host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            host.copy_(values, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
            self._pending = (host, event)
        else:
            self._pending = (values.detach().clone(), None)
        return previous

    def flush(self) -> list[float] | None:
        """Returns what is pending, waiting for it."""
        if self._pending is None:
            return None
        host, event = self._pending
        self._pending = None
        if event is not None:
            event.synchronize()
        return host.tolist()


@dataclass
class Clock:
    """Where the time of a logging window went; evaluation and saving are not counted."""

    images: int = 0
    train_s: float = 0.0
    wait_s: float = 0.0
    begun: float = field(default_factory=time.monotonic)

    def rates(self) -> dict[str, float]:
        """Returns images per second, and the share of the host's time spent waiting for data."""
        seconds = max(self.train_s, 1e-9)
        return {"images_per_s": self.images / seconds, "data_wait_frac": self.wait_s / seconds}


class _Reader:
    """Reads reports of steps late, has each judged, and what is damaged told to all ranks."""

    def __init__(self, world_size: int, guard: Guard, hooks: Hooks) -> None:
        self._late, self._world_size = LateReader(), world_size
        self._guard, self._hooks = guard, hooks

    def push(self, values: Tensor, step: int) -> list[float] | None:
        """Hands in a step's report; returns the one of `step`, before it."""
        return self._judged(self._late.push(values), step)

    def flush(self, step: int) -> list[float] | None:
        """Waits for the report of `step`."""
        return self._judged(self._late.flush(), step)

    def _judged(self, values: list[float] | None, step: int) -> list[float] | None:
        if values is None:
            return None
        if values[4] > 0:
            self._hooks.share_damage()
        # A step that fp16 skipped has changed nothing.
        if not values[3]:
            self._guard.judge(step, values[0] / self._world_size, values[1])
        return values


def _read_now(reader: _Reader, clock: Clock, done: int) -> list[float]:
    """Waits for the step just taken and returns its report, checked."""
    begun = time.monotonic()
    values = reader.flush(done)
    clock.train_s += time.monotonic() - begun
    assert values is not None
    return values


@dataclass(frozen=True)
class _Report:
    """A step's loss, gradient norm, flags and new damaged samples; sum and count of each named value.

    Summed over ranks; the norm is global. `skipped` is 1, on all ranks, if fp16 gradients overflowed.
    """

    loss: Tensor
    grad_norm: Tensor
    stop: Tensor
    skipped: Tensor
    damaged: Tensor
    due: Tensor
    names: list[str]
    values: list[Tensor]

    def packed(self) -> Tensor:
        flags = (self.stop, self.skipped, self.damaged, self.due)
        return torch.stack([self.loss, self.grad_norm, *flags, *self.values])

    def ratios(self, read: list[float]) -> dict[str, float | None]:
        """Turns what was read of `values` into named means."""
        pairs = zip(self.names, read[::2], read[1::2], strict=True)
        return {name: _or_none(total / max(count, 1.0)) for name, total, count in pairs}


def _on_device(value: float, device: torch.device) -> Tensor:
    """A scalar filled in by the device: `torch.tensor` copies it there, and waits for all before."""
    return torch.full((), value, device=device)


def _or_none(value: float) -> float | None:
    """A value for JSON, which knows no infinity: only steps that fp16 skipped are not finite."""
    return value if math.isfinite(value) else None
