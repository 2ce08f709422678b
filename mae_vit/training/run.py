"""One run from its start to its end: what pretraining and fine-tuning share."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

from mae_vit.config.load import dump_config
from mae_vit.config.plan import Plan
from mae_vit.config.schema import Config
from mae_vit.core.batch import Batch
from mae_vit.core.errors import InputError
from mae_vit.core.keyed_rng import noise_seed
from mae_vit.core.messages import reason_of
from mae_vit.core.urls import shown
from mae_vit.data.order.skipped_steps import Skipped
from mae_vit.runtime.collectives import barrier, decided_by_rank_zero, from_rank_zero
from mae_vit.runtime.exit_codes import EXIT_REQUEUE
from mae_vit.runtime.failures import BadStep, LostRank, TrainingFailed, is_lost_rank
from mae_vit.runtime.signals import StopRequest
from mae_vit.runtime.terminal import outlive_terminal
from mae_vit.runtime.watchdog import Watchdog
from mae_vit.training.callbacks import Judge, RunHooks, Views
from mae_vit.training.checkpoints.checkpoint import CheckpointInfo, load_together
from mae_vit.training.checkpoints.format import BrokenCheckpoint
from mae_vit.training.checkpoints.resume import Identity
from mae_vit.training.engines.base import Engine
from mae_vit.training.engines.cost import Estimate
from mae_vit.training.engines.peak_rates import peak_flops
from mae_vit.training.engines.state import Best, Course
from mae_vit.training.evals import HeldOut, OnlineProbe
from mae_vit.training.loop import Outcome, train
from mae_vit.training.optim.lr_schedule import rate_at
from mae_vit.training.outputs.environment import describe_environment
from mae_vit.training.outputs.run_folder import RunFolder
from mae_vit.training.recovery.guard import Guard
from mae_vit.training.recovery.quarantine import Quarantine
from mae_vit.training.recovery.rollback import Rollbacks
from mae_vit.training.startup import held


class Work(Protocol):
    """What a job brings to a run; all ranks call it alike."""

    def batches(self, start_step: int, skipped: Skipped) -> Iterator[Batch]:
        """Yields this rank's micro-batches from `start_step` to the end of the run."""

    def samples_of(self, data_step: int) -> list[dict[str, Any]]:
        """Names the samples of a step of the data order, over all ranks, for people."""

    def held_out(self) -> HeldOut | None:
        """Held-out images, None where there are none."""

    def probe(self) -> OnlineProbe | None:
        """The online probe, None where there is none."""

    def views(self) -> Views | None:
        """What draws views of the encoder, None where none are asked for."""

    def finish(self, step: int, best: Best | None) -> tuple[dict[str, Any], Callable[[], None]]:
        """Finds what a finished run leaves; returns what goes into its summary, and what writes the rest on rank 0.

        That write calls nothing collective: a full disk on one node leaves no rank waiting.
        """

    def results(self) -> list[str]:
        """Names what was written, for people, on rank 0."""


@dataclass(frozen=True)
class Run:
    """A run whose parts are all there.

    Attributes:
        config: of the run.
        plan: its numbers.
        engine: takes the steps.
        folder: where it leaves what it makes.
        identity: what must not change when it goes on.
        costs: what its steps cost.
        noisy: whether layers draw noise (dropout, drop-path).
        selects: the name of the held-out metric by which the best weights are kept; None
            for the last weights.
        begins_from: what a fresh start begins from, for people.
        advice: said where no images are held out.
        judge: looks at lines of metrics, and may have a word to say.
    """

    config: Config
    plan: Plan
    engine: Engine
    folder: RunFolder
    identity: Identity
    costs: Estimate
    noisy: bool
    selects: str | None = None
    begins_from: str = "scratch"
    advice: str = ""
    judge: Judge | None = None

    def go(self, work: Work, found: CheckpointInfo | None) -> int:
        """Trains from `found`, a checkpoint, or from the beginning, to the end or to a signal; returns the exit code.

        Raises:
            InputError: if more samples are known to be damaged than are allowed now, or if a rank
                cannot read `found`.
            TrainingFailed: if it cannot go on.
        """
        outlive_terminal()
        quarantine = self._quarantine(found.step if found else 0)
        with held(self.folder, self.engine.ranks):
            return self._go(work, found, quarantine)

    def _go(self, work: Work, found: CheckpointInfo | None, quarantine: Quarantine) -> int:
        """In a folder that is this run's alone."""
        begun, start_step = time.monotonic(), found.step if found else 0
        ranks, config_yaml = self.engine.ranks, dump_config(self.config)

        def create() -> None:
            self.folder.create(config_yaml, describe_environment(sys.argv, ranks.world_size))

        decided_by_rank_zero(create, ranks)
        try:
            best = self._restore(found) if found else None
        except BrokenCheckpoint as error:
            raise InputError(str(error)) from None
        stop = StopRequest()
        watchdog = Watchdog(self.config.run.hang_timeout_s, rank=self.engine.ranks.rank)
        guard = Guard(self.config.guard, found.course if found else Course())
        hooks = RunHooks(
            self.engine,
            self.folder,
            self.plan,
            checkpoint=self.config.checkpoint,
            identity=self.identity.values,
            held_out=work.held_out(),
            probe=work.probe(),
            quarantine=quarantine,
            data_folder=shown(self.config.data.path),
            stop=stop,
            guard=guard,
            watchdog=watchdog,
            start_step=start_step,
            resumed_from=found.path if found else None,
            config_yaml=config_yaml,
            tensorboard=self.config.monitor.tensorboard,
            selects=self.selects,
            best=best,
            begins_from=self.begins_from,
            facts=self._facts(),
            advice=self.advice,
            views=work.views(),
            judge=self.judge,
        )
        try:
            with watchdog:
                if found is None:
                    # To go back to, should a step before the next save be bad.
                    hooks.save(0, last=False, stopping=False)
                outcome = self._train(work, hooks, start_step)
            # Writing results takes as long as it takes.
            self._end(work, hooks, outcome)
        except BaseException as error:
            hooks.end("failed", None)
            if is_lost_rank(error):
                raise LostRank(
                    f"rank {ranks.rank} has lost the connection to another rank, which was killed or has "
                    "failed: its own message says why; the last checkpoint is good"
                ) from None
            raise
        # All ranks leave together: a launcher that sees one exit would kill the
        # others in whatever they still write.
        stop.dismiss()
        barrier(ranks)
        self.engine.close()
        if ranks.rank == 0:
            if not outcome.finished:
                print(
                    f"stopped at step {outcome.step}/{self.plan.total_steps} after saving; the same command goes on"
                )
            else:
                here = f", {outcome.step - start_step} of them here" if found else ""
                print(f"done: {outcome.step} steps{here} in {time.monotonic() - begun:.0f} s")
                print("\n".join(self._results(work.results())))
        return 0 if outcome.finished else EXIT_REQUEUE

    def _train(self, work: Work, hooks: RunHooks, step: int) -> Outcome:
        """Trains from `step` on; goes back and past the data of steps that are bad."""
        rollbacks = Rollbacks(self.folder, self.config.guard, self.engine.ranks, work.samples_of)
        while True:
            try:
                return train(
                    self.engine,
                    work.batches(step, hooks.guard.course.skipped),
                    hooks,
                    hooks.guard,
                    plan=self.plan,
                    rate=self._rate(),
                    noise_seed=self._noise_seed(),
                    start_step=step,
                    log_every_steps=self.config.monitor.log_every_steps,
                    flops_per_image=self.costs.flops_per_image,
                    peak_flops=peak_flops(self.engine.device, self.config.train.precision),
                )
            except BadStep as bad:
                hooks.settle()
                with hooks.patient("going back"):
                    found, course = rollbacks.find(bad, hooks.guard.course)
                    try:
                        best = self._restore(found)
                    except BrokenCheckpoint as error:
                        raise TrainingFailed(f"{bad}; {error}") from None
                hooks.go_back(bad, found.step, best, Guard(self.config.guard, course))
                step = found.step

    def _restore(self, found: CheckpointInfo) -> Best | None:
        """Puts a saved state into the engine and returns the best weights in it; collective.

        The state lives in host memory only as long as this call: it is twice to three times the
        model, on every rank, and a run may last for weeks.

        Raises:
            BrokenCheckpoint: on all ranks, if one cannot read it.
        """
        state = load_together(found.path, self.engine.ranks)
        self.engine.restore(state)
        if state.best is None or self.engine.ranks.rank == 0:
            return state.best
        return replace(state.best, tensors={})

    def _end(self, work: Work, hooks: RunHooks, outcome: Outcome) -> None:
        """Leaves the results; a disk that does not take them fails all ranks together."""
        problem, results, write = None, dict[str, Any](), None
        if outcome.finished:
            results, write = work.finish(outcome.step, hooks.best)
        try:
            if write is not None and self.engine.ranks.rank == 0:
                write()
            hooks.end("done" if outcome.finished else "interrupted", outcome.step, results)
        except OSError as error:
            problem = f"results cannot be written to {self.folder.path}: {reason_of(error)}"
        if problem := from_rank_zero(problem, self.engine.ranks):
            raise TrainingFailed(
                f"{problem}; the last state is saved: make room, then the same command goes on"
            )

    def _quarantine(self, start_step: int) -> Quarantine:
        """Takes up the list of damaged samples; refuses one that is over the budget already."""
        quarantine = Quarantine(
            self.folder.quarantine,
            self.engine.ranks,
            share=self.config.data.damage_budget,
            samples=self.plan.num_samples,
            start_step=start_step,
        )
        if quarantine.exceeded:
            raise InputError(
                f"{quarantine.path} lists {len(quarantine.samples):,} damaged samples, "
                f"data.damage_budget={quarantine.share:g} allows {quarantine.allowed:,}: raise the budget"
            )
        return quarantine

    def _facts(self) -> dict[str, Any]:
        """What a comparison of runs needs of each."""
        return {
            "parameters": self.costs.parameters,
            "epochs": self.plan.total_steps / self.plan.steps_per_epoch,
            "flops_per_step": self.costs.flops_per_image * self.plan.effective_batch_size,
        }

    def _rate(self) -> Callable[[int], float]:
        return partial(
            rate_at,
            schedule=self.config.optim.schedule,
            peak=self.plan.lr,
            warmup_steps=self.plan.warmup_steps,
            total_steps=self.plan.total_steps,
            min_rate=self.config.optim.min_lr,
            decay_steps=self.plan.decay_steps,
        )

    def _noise_seed(self) -> Callable[[int, int], int] | None:
        """The seed of dropout and drop-path for a step and micro-batch; None where the model has neither."""
        if not self.noisy:
            return None
        return partial(noise_seed, self.config.run.seed, self.engine.ranks.rank)

    def _results(self, results: Sequence[str]) -> list[str]:
        lines = list(results)
        if pictures := sorted(self.folder.pictures.glob("step-*.png")):
            lines.append(f"  pictures  {pictures[-1]}")
        lines.append(f"  metrics   {self.folder.metrics}")
        if self.config.monitor.tensorboard:
            lines.append(f"  watch     tensorboard --logdir {self.folder.path.parent}")
        return lines
