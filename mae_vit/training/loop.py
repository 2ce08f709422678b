"""The training loop: one for all objectives, engines and launchers."""

from __future__ import annotations

import math
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from mae_vit.batch import Batch
from mae_vit.errors import Damage
from mae_vit.plan import Plan
from mae_vit.training.engine import Engine
from mae_vit.training.guard import Guard
from mae_vit.training.late import LateReader


class Hooks(Protocol):
    """What the loop calls, on all ranks alike."""

    def beat(self, doing: str) -> None:
        """Hears that this rank goes on, and with what."""

    def stop_requested(self) -> bool:
        """True once this rank was asked to stop."""

    def note_damage(self, step: int, found: Sequence[Damage]) -> int:
        """Takes the damaged samples of a micro-batch; returns how many are new to this rank."""

    def share_damage(self) -> None:
        """Tells all ranks of what is new to any; raises TrainingFailed over the budget."""

    def evaluate(self, step: int) -> dict[str, float]:
        """Measures held-out images; empty where there are none."""

    def probe(self) -> dict[str, float]:
        """Scores the frozen features; empty where there is no probe."""

    def inspect(self, step: int) -> None:
        """Draws views of what is trained."""

    def log(self, line: dict[str, Any]) -> None:
        """Takes a line of metrics."""

    def save(self, step: int, *, last: bool, stopping: bool) -> None:
        """Writes a checkpoint; every step before it has been read as good."""


@dataclass
class Clock:
    """Where the time of a logging window went; evaluation and saving are not counted."""

    images: int = 0
    train_s: float = 0.0
    wait_s: float = 0.0
    begun: float = field(default_factory=time.monotonic)

    def rates(self) -> dict[str, float]:
        """Returns images per second, and the share of time spent waiting for data."""
        seconds = max(self.train_s, 1e-9)
        return {"images_per_s": self.images / seconds, "data_wait_frac": self.wait_s / seconds}


@dataclass(frozen=True)
class Outcome:
    """How a call of `train` ended.

    Attributes:
        step: optimizer steps done over the whole run.
        finished: False if it was asked to stop before the last.
    """

    step: int
    finished: bool


def train(
    engine: Engine,
    batches: Iterator[Batch],
    hooks: Hooks,
    guard: Guard,
    *,
    plan: Plan,
    rate: Callable[[int], float],
    noise_seed: Callable[[int, int], int] | None = None,
    start_step: int,
    log_every_steps: int,
    flops_per_image: float = 0.0,
    peak_flops: float | None = None,
) -> Outcome:
    """Trains from `start_step` to the end of the plan, or until all ranks agree to stop.

    Loss, gradient norm and stop flags are reduced over ranks on the device at each
    step and read one step late; only log steps and saves wait for the device.

    Args:
        engine: takes the steps.
        batches: this rank's micro-batches from `start_step` on.
        hooks: logging, evaluation, saving.
        guard: judges every step.
        plan: lengths and batch sizes.
        rate: learning rate of a step.
        noise_seed: seed of noise inside layers, of (step, micro-batch); None where the
            model draws none.
        start_step: steps done before.
        log_every_steps: steps between lines of metrics.
        flops_per_image: model FLOPs of one image's step; 0 if unknown.
        peak_flops: the device's peak for this precision, None if unknown.

    Raises:
        BadStep: on all ranks, where the guard finds one.
        TrainingFailed: on all ranks, where more samples are damaged than allowed, or too many
            saves failed.
    """
    reader = _Reader(engine.ranks.world_size, guard, hooks)
    clock, begun = Clock(), time.monotonic()
    for step in range(start_step, plan.total_steps):
        step_begun = time.monotonic()
        lr = rate(step)
        engine.objective.begin_step(step)
        seed_of = partial(noise_seed, step) if noise_seed else None
        report = _take_step(engine, batches, plan, step, lr, hooks, clock, seed_of)
        late = reader.push(report.packed(), step)
        done = step + 1
        clock.images += plan.effective_batch_size
        clock.train_s += time.monotonic() - step_begun

        stopping = late is not None and late[2] > 0
        last = done == plan.total_steps
        evaluating = last or done % plan.evaluate_every_steps == 0
        saving = last or stopping or done % plan.checkpoint_every_steps == 0
        probing = plan.probe_every_steps > 0 and (last or done % plan.probe_every_steps == 0)
        inspecting = plan.inspect_every_steps > 0 and (last or done % plan.inspect_every_steps == 0)
        logging = evaluating or probing or inspecting or done % log_every_steps == 0
        if not (logging or saving):
            continue
        now = _read_now(reader, clock, done)
        # A stop asked for in this very step is seen by all ranks here too.
        stopping = stopping or now[2] > 0
        if logging:
            line: dict[str, Any] = {
                "step": done,
                "epoch": done / plan.steps_per_epoch,
                "samples": done * plan.effective_batch_size,
                "loss": _or_none(now[0] / engine.ranks.world_size),
                "lr": lr,
                "grad_norm": _or_none(now[1]),
                **report.ratios(now[5:]),
                **_scale_of(engine),
                **clock.rates(),
                "peak_memory_gib": peak_memory_gib(engine.device),
            }
            if peak_flops and flops_per_image:
                line["mfu"] = line["images_per_s"] * flops_per_image / peak_flops / engine.ranks.world_size
            if evaluating and (heldout := hooks.evaluate(done)):
                line["heldout"] = heldout
            if probing and (probe := hooks.probe()):
                line["probe"] = probe
            line["wall_s"] = time.monotonic() - begun
            hooks.log(line)
            if inspecting:
                hooks.inspect(done)
            clock = Clock()
        # Not while steps are in doubt: the next save comes soon enough.
        if last or stopping or (saving and guard.quiet):
            hooks.save(done, last=last, stopping=stopping)
        if stopping and not last:
            return Outcome(done, False)
    return Outcome(plan.total_steps, True)


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
    """A step's loss, gradient norm, stop flag and new damaged samples; sum and count of each named value.

    Summed over ranks; the norm is global. `skipped` is alike on all ranks: 1 if fp16
    gradients overflowed and nothing was updated.
    """

    loss: Tensor
    grad_norm: Tensor
    stop: Tensor
    skipped: Tensor
    damaged: Tensor
    names: list[str]
    values: list[Tensor]

    def packed(self) -> Tensor:
        flags = (self.stop, self.skipped, self.damaged)
        return torch.stack([self.loss, self.grad_norm, *flags, *self.values])

    def ratios(self, read: list[float]) -> dict[str, float | None]:
        """Turns what was read of `values` into named means."""
        pairs = zip(self.names, read[::2], read[1::2], strict=True)
        return {name: _or_none(total / max(count, 1.0)) for name, total, count in pairs}


def _take_step(
    engine: Engine,
    batches: Iterator[Batch],
    plan: Plan,
    step: int,
    lr: float,
    hooks: Hooks,
    clock: Clock,
    seed_of: Callable[[int], int] | None,
) -> _Report:
    loss = torch.zeros((), device=engine.device)
    stop, damaged = hooks.stop_requested(), 0
    values: dict[str, Tensor] = {}  # (sum, count)
    for micro_batch in range(plan.accumulation):
        hooks.beat("waiting for data")
        waiting = time.monotonic()
        batch = next(batches)
        clock.wait_s += time.monotonic() - waiting
        hooks.beat("in a step, which all ranks take together")
        damaged += hooks.note_damage(step + 1, batch.damaged)
        if seed_of is not None:
            torch.manual_seed(seed_of(micro_batch))
        output = engine.forward(batch.to(engine.device))
        engine.backward(output.loss)
        loss = loss + output.loss.detach().float() / plan.accumulation
        for name, value in output.values.items():
            values[name] = values.get(name, 0.0) + torch.stack([part.float() for part in value])
    result = engine.step(lr)
    names = sorted(values)
    flags = (_on_device(float(flag), engine.device) for flag in (stop, damaged))
    sums = engine.all_reduce_sum(
        torch.stack([loss, *flags, *(part for name in names for part in values[name])])
    )
    skipped = _on_device(float(result.skipped), engine.device)
    return _Report(sums[0], result.grad_norm.float(), sums[1], skipped, sums[2], names, list(sums[3:]))


def _on_device(value: float, device: torch.device) -> Tensor:
    """A scalar filled in by the device: `torch.tensor` copies it there, and waits for all before."""
    return torch.full((), value, device=device)


def _or_none(value: float) -> float | None:
    """A value for JSON, which knows no infinity: only steps that fp16 skipped are not finite."""
    return value if math.isfinite(value) else None


def _scale_of(engine: Engine) -> dict[str, float]:
    """fp16's loss scale, and the steps skipped so far."""
    scale = engine.loss_scale
    return {} if scale is None else {"loss_scale": scale.scale, "skipped_steps": scale.skipped_steps}


def peak_memory_gib(device: torch.device) -> float:
    """Peak memory of this rank: the GPU's allocations, or the process's resident set on CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
