"""The training loop: one for all objectives, engines and launchers."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mae_vit.config.plan import Plan
from mae_vit.core.batch import Batch
from mae_vit.training.callbacks import Hooks
from mae_vit.training.copying import Copier
from mae_vit.training.engines.base import Engine
from mae_vit.training.recovery.guard import Guard
from mae_vit.training.step_report import Clock, _on_device, _or_none, _read_now, _Reader, _Report


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

    Loss, gradient norm, requests to stop and to save are reduced over ranks on the device at each
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
    reader, copy = _Reader(engine.ranks.world_size, guard, hooks), Copier(engine.device)
    clock, begun = Clock(), time.monotonic()
    for step in range(start_step, plan.total_steps):
        step_begun = time.monotonic()
        lr = rate(step)
        engine.objective.begin_step(step)
        seed_of = partial(noise_seed, step) if noise_seed else None
        report = _take_step(engine, batches, copy, plan, step, lr, hooks, clock, seed_of)
        late = reader.push(report.packed(), step)
        done = step + 1
        clock.images += plan.effective_batch_size
        clock.train_s += time.monotonic() - step_begun

        stopping, due = (late is not None and late[place] > 0 for place in (2, 5))
        last = done == plan.total_steps
        evaluating = last or done % plan.evaluate_every_steps == 0
        saving = last or stopping or due or done % plan.checkpoint_every_steps == 0
        probing = plan.probe_every_steps > 0 and (last or done % plan.probe_every_steps == 0)
        inspecting = plan.inspect_every_steps > 0 and (last or done % plan.inspect_every_steps == 0)
        logging = evaluating or probing or inspecting or done % log_every_steps == 0
        if not (logging or saving):
            continue
        now = _read_now(reader, clock, done)
        # A stop or a save asked for in this very step is seen by all ranks here too.
        stopping, saving = stopping or now[2] > 0, saving or now[5] > 0
        if logging:
            line: dict[str, Any] = {
                "step": done,
                "epoch": done / plan.steps_per_epoch,
                "samples": done * plan.effective_batch_size,
                "loss": _or_none(now[0] / engine.ranks.world_size),
                "lr": lr,
                "grad_norm": _or_none(now[1]),
                **report.ratios(now[6:]),
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


def _take_step(
    engine: Engine,
    batches: Iterator[Batch],
    copy: Copier,
    plan: Plan,
    step: int,
    lr: float,
    hooks: Hooks,
    clock: Clock,
    seed_of: Callable[[int], int] | None,
) -> _Report:
    loss = torch.zeros((), device=engine.device)
    stop, due, damaged = hooks.stop_requested(), hooks.save_due(), 0
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
        output = engine.forward(copy(batch))
        engine.backward(output.loss)
        loss = loss + output.loss.detach().float() / plan.accumulation
        for name, value in output.values.items():
            values[name] = values.get(name, 0.0) + torch.stack([part.float() for part in value])
    result = engine.step(lr)
    names = sorted(values)
    flags = (_on_device(float(flag), engine.device) for flag in (stop, damaged, due))
    sums = engine.all_reduce_sum(
        torch.stack([loss, *flags, *(part for name in names for part in values[name])])
    )
    skipped = _on_device(float(result.skipped), engine.device)
    head = (sums[0], result.grad_norm.float(), sums[1], skipped, sums[2], sums[3])
    return _Report(*head, names, list(sums[4:]))


def _scale_of(engine: Engine) -> dict[str, float]:
    """fp16's loss scale, and the steps skipped so far."""
    scale = engine.loss_scale
    return {} if scale is None else {"loss_scale": scale.scale, "skipped_steps": scale.skipped_steps}


def peak_memory_gib(device: torch.device) -> float:
    """Peak memory of this rank: the GPU's allocations, or the process's resident set on CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
