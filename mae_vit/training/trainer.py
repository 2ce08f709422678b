"""The training loop for all objectives, engines and launchers; `Trainer.train_step` is one step."""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Generator, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from mae_vit.core.batch import Batch
from mae_vit.core.keyed_rng import noise_seed
from mae_vit.runtime.failures import BadStep, TrainingFailed
from mae_vit.runtime.ranks import run_on_rank_zero
from mae_vit.runtime.signals import StopRequest
from mae_vit.runtime.watchdog import Watchdog
from mae_vit.training.checkpoints.checkpoint import BrokenCheckpoint, CheckpointInfo, load_together
from mae_vit.training.checkpoints.saver import Saver
from mae_vit.training.engines.base import Engine
from mae_vit.training.engines.cost import peak_flops
from mae_vit.training.engines.state import BestWeights
from mae_vit.training.evals import Evals
from mae_vit.training.optim import lr_at
from mae_vit.training.outputs.run_folder import RunFolder
from mae_vit.training.outputs.run_outputs import RunOutputs, peak_memory_gib
from mae_vit.training.recovery import Recovery
from mae_vit.training.setup import TrainingSetup
from mae_vit.training.step_report import StepReport, StepTimer, StepValues, finite_or_none


class Copier:
    """Copies batches to the device; to a GPU on a separate stream.

    The loop requests the next batch while the GPU still computes. On a separate stream the copy
    overlaps with the computation instead of delaying the next step.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._copying = deque[tuple[torch.cuda.Event, Batch]]()

    def __call__(self, batch: Batch) -> Batch:
        """Starts the copies without blocking; later kernels wait for them on the GPU."""
        if self._stream is None:
            return batch.to(self._device)
        with torch.cuda.stream(self._stream):
            copied = batch.to(self._device)
        # The loader reuses a batch's memory once nothing refers to it.
        self._copying.append((self._stream.record_event(), batch))
        while self._copying and self._copying[0][0].query():
            self._copying.popleft()
        computing = torch.cuda.current_stream(self._device)
        computing.wait_stream(self._stream)
        for tensor in (copied.images, copied.labels, copied.keys.index, copied.masks):
            # Otherwise the next copy could reuse memory that the host has freed and the GPU still reads.
            if tensor is not None:
                tensor.record_stream(computing)
        return copied


def draws_noise(model: nn.Module) -> bool:
    """Returns whether layers draw random numbers: dropout or stochastic depth, by PyTorch's and timm's names."""

    def rates(module: nn.Module) -> list[Any]:
        drops = re.search("drop|stochastic", type(module).__name__, re.IGNORECASE)
        return [
            getattr(module, name, 0) for name in ("dropout", *(("p", "drop_prob", "prob") if drops else ()))
        ]

    return any(isinstance(r, int | float) and r > 0 for module in model.modules() for r in rates(module))


@dataclass(frozen=True)
class Outcome:
    """How training ended."""

    step: int
    finished: bool
    saved: bool = True


@dataclass
class Trainer:
    """Runs the steps: trains, checks, logs, evaluates, saves. Every method is called on every rank.

    Each step reduces loss, gradient norm, and requests to stop and to save over ranks on the device.
    The host reads them one step late; only the first step, log steps and saves wait for the device.
    """

    setup: TrainingSetup
    engine: Engine
    folder: RunFolder
    evals: Evals
    outputs: RunOutputs
    recovery: Recovery
    saver: Saver
    stop: StopRequest
    watchdog: Watchdog

    def __post_init__(self) -> None:
        self.plan, self.ranks = self.setup.plan, self.engine.ranks
        self._copy = Copier(self.engine.device)
        self._noisy = draws_noise(self.engine.objective)

    def fit(self, checkpoint: CheckpointInfo | None) -> Outcome:
        """Trains from `checkpoint`, or the beginning, to the last step, or until all ranks agree to stop."""
        step = checkpoint.step if checkpoint else 0
        if checkpoint is None:
            self.evals.probe_first(self.outputs)
        # A rollback needs this checkpoint if a step before the next save is bad.
        if not run_on_rank_zero(lambda: self.folder.has(checkpoint), self.ranks):
            self.save(step)
        while True:
            try:
                return self.train(step)
            except BadStep as bad:  # on all ranks together
                step = self.recover(bad)

    def train(self, start_step: int) -> Outcome:
        """Trains from `start_step` on."""
        batches = self.setup.batches(start_step, self.recovery.guard.course.skipped)
        try:
            return self._train_on(batches, start_step)
        finally:
            # End data workers now: a notebook keeps tracebacks, which keep this frame and its workers.
            if isinstance(batches, Generator):
                batches.close()

    def _train_on(self, batches: Iterator[Batch], start_step: int) -> Outcome:
        last: StepReport | None = None
        owed = False  # a save
        timer, begun = StepTimer(), time.monotonic()
        for step in range(start_step, self.plan.total_steps):
            step_begun, done = time.monotonic(), step + 1
            report = self.train_step(batches, step, timer)
            before = last.read() if last else None
            if before is not None:
                self.recovery.check(step, before)
            last = report
            timer.count(self.plan.effective_batch_size, since=step_begun)

            due = self.plan.due(done, log_every_steps=self.setup.config.monitor.log_every_steps)
            stopping = before is not None and before.stop
            saving = owed or due.save or stopping or (before is not None and before.save_due)
            if not (due.log or saving or step == start_step):
                self.outputs.show_step(done, time.monotonic() - step_begun)
                continue
            flush_begun = time.monotonic()
            values, last = report.read(), None  # waits for the step just taken
            self.recovery.check(done, values)
            timer.count(0, since=flush_begun)
            self.outputs.show_step(done, time.monotonic() - step_begun)
            # All ranks see a stop or a save that was requested in this step.
            stopping, saving = stopping or values.stop, saving or values.save_due
            if due.log:
                line = self.line(done, values, timer)
                line |= self.evals.run(due, done, self.outputs)
                line["wall_s"] = time.monotonic() - begun
                line |= self.saver.take_stall()
                self.outputs.log(line)
                timer = StepTimer()
            # Do not save a state that may turn out bad: wait for a good step.
            owed = saving and not self.recovery.guard.no_suspects
            if due.last or stopping or (saving and not owed):
                saved = self.save(done, last=due.last, wait=due.last or stopping)
                if stopping and not due.last:
                    return Outcome(done, finished=False, saved=saved)
        return Outcome(self.plan.total_steps, finished=True)

    def train_step(self, batches: Iterator[Batch], step: int, timer: StepTimer) -> StepReport:
        """Runs one optimizer step without waiting for the device."""
        report = StepReport(self.engine, stop=bool(self.stop), save_due=self.saver.due())
        for micro_batch in range(self.plan.accumulation):
            self.watchdog.heartbeat("waiting for data")
            waiting = time.monotonic()
            batch = next(batches)
            timer.wait_s += time.monotonic() - waiting
            self.watchdog.heartbeat("in a training step")
            report.damaged += self.recovery.quarantine.note(step + 1, batch.damaged)
            if self._noisy:
                torch.manual_seed(noise_seed(self.setup.config.run.seed, self.ranks.rank, step, micro_batch))
            output = self.engine.forward(self._copy(batch))  # loss: float32 ()
            self.engine.backward(output.loss)  # gradients / accumulation
            report.add(output, micro_batches=self.plan.accumulation)
        return report.reduce(self.engine.step(self.lr(step)))

    def lr(self, step: int) -> float:
        """Returns the learning rate of a step, counted from 0."""
        return lr_at(
            step,
            peak_lr=self.plan.lr,
            warmup_steps=self.plan.warmup_steps,
            total_steps=self.plan.total_steps,
            min_lr=self.setup.config.optim.min_lr,
        )

    def line(self, done: int, values: StepValues, timer: StepTimer) -> dict[str, Any]:
        """Returns a line of `metrics.jsonl`."""
        scale = self.engine.loss_scale  # of fp16
        scaling = {"loss_scale": scale.scale, "skipped_steps": scale.skipped_steps} if scale else {}
        line: dict[str, Any] = {
            "step": done,
            "epoch": done / self.plan.steps_per_epoch,
            "samples": done * self.plan.effective_batch_size,
            "loss": finite_or_none(values.loss),
            "lr": self.lr(done - 1),
            "grad_norm": finite_or_none(values.grad_norm),
            **values.means,
            **scaling,
            **timer.rates(),
            "peak_memory_gib": peak_memory_gib(self.engine.device),
        }
        peak = peak_flops(self.engine.device, self.setup.config.train.precision)
        if peak and (flops := self.setup.costs.flops_per_image):
            line["mfu"] = line["images_per_s"] * flops / peak / self.ranks.world_size
        return line

    def save(self, step: int, *, last: bool = False, wait: bool = False) -> bool:
        """Saves a checkpoint; returns False if it is known to have failed; collective.

        Raises TrainingFailed on all ranks, if the run's last state or too many states in a row could not be saved.
        """
        self.outputs.summarize("running", step)
        with self.watchdog.long_phase("saving"):
            saved = self.saver.save(step, self.evals.best, self.recovery.guard.course, wait=wait)
        if last and not saved:
            raise TrainingFailed(
                f"the run's last state could not be saved; make room, then {self.folder.again} resumes from "
                "the last good checkpoint"
            )
        return saved

    def recover(self, bad: BadStep) -> int:
        """Rolls back to a checkpoint before a bad step; returns the step to resume from; collective."""
        with self.watchdog.long_phase("going back"):
            with suppress(BadStep):  # from the current save
                self.saver.wait()
            checkpoint = self.recovery.go_back(bad)
            try:
                self.evals.best = restore(self.engine, checkpoint, self.folder)
            except BrokenCheckpoint as error:
                raise TrainingFailed(f"{bad}; {error}") from None
        # The pending save has finished, so the newest checkpoint is on disk.
        self.saver.restart_clock()
        self.outputs.go_back(bad, checkpoint.step, self.recovery.guard.course.skipped)
        return checkpoint.step


def restore(engine: Engine, checkpoint: CheckpointInfo, folder: RunFolder) -> BestWeights | None:
    """Restores a checkpoint into the engine and returns its best weights; collective.

    It takes two to three times the model's size of host memory on every rank. Raises BrokenCheckpoint on all ranks.
    """
    state = load_together(checkpoint.path, engine.ranks, folder.bring)
    engine.restore(state)
    if state.best is None or engine.ranks.rank == 0:
        return state.best
    return replace(state.best, tensors={})
