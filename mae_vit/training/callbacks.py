"""What a run does beside training: log, evaluate, save, and say how it ended."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from mae_vit.config.plan import Plan
from mae_vit.config.schema import CheckpointSection
from mae_vit.core.errors import Damage
from mae_vit.core.messages import reason_of
from mae_vit.objectives.objective import Task
from mae_vit.runtime.collectives import barrier, decided_by_rank_zero
from mae_vit.runtime.failures import BadStep, TrainingFailed
from mae_vit.runtime.signals import StopRequest
from mae_vit.runtime.watchdog import Watchdog
from mae_vit.training.checkpoints.saver import Saver
from mae_vit.training.engines.base import Engine
from mae_vit.training.engines.state import Best, weights_of
from mae_vit.training.evals import HeldOut, OnlineProbe
from mae_vit.training.outputs.monitor import Monitor
from mae_vit.training.outputs.run_folder import RunFolder, Status
from mae_vit.training.recovery.guard import Guard
from mae_vit.training.recovery.quarantine import Quarantine

# Draws views of a task with some held-out images: name -> uint8 (H, W, 3).
Views = Callable[[Task, Tensor], Mapping[str, np.ndarray]]
# Looks at a line of metrics; returns what is to be said of it, if anything.
Judge = Callable[[Mapping[str, Any]], str | None]
# Lines about damaged samples in a sitting; the list has all.
_MAX_WARNINGS = 10


class RunHooks:
    """The loop's hooks; all ranks call them, rank 0 writes."""

    def __init__(
        self,
        engine: Engine,
        folder: RunFolder,
        plan: Plan,
        *,
        checkpoint: CheckpointSection,
        identity: dict[str, Any],
        held_out: HeldOut | None,
        probe: OnlineProbe | None,
        quarantine: Quarantine,
        data_folder: str,
        stop: StopRequest,
        guard: Guard,
        watchdog: Watchdog,
        start_step: int,
        resumed_from: Path | None,
        config_yaml: str,
        tensorboard: bool,
        selects: str | None = None,
        best: Best | None = None,
        begins_from: str = "scratch",
        facts: Mapping[str, Any] | None = None,
        advice: str = "",
        views: Views | None = None,
        judge: Judge | None = None,
    ) -> None:
        """Opens the outputs of a run that begins, or goes on, at `start_step`.

        With `selects` the weights of the largest held-out metric of this name are kept in
        `best`, on all ranks, and with every checkpoint: so a resumed run chooses as the
        undisturbed one does. `facts` go into every summary. `advice` is said where nothing is
        held out. `views` draws the encoder, `judge` may have a word to
        say of a line of metrics.
        """
        self.best, self._selects, self.guard = best, selects, guard
        self._engine, self._folder, self._plan = engine, folder, plan
        self._facts = dict(facts or {})
        self._held_out, self._probe, self._stop = held_out, probe, stop
        self._views, self._judge = views, judge
        self._watchdog = watchdog
        self._quarantine, self._data_folder, self._warnings = quarantine, data_folder, 0
        self._last_line: dict[str, Any] = {}
        self._wall_s_before = 0.0
        self._monitor: Monitor | None = None
        self._saver = Saver(
            engine,
            folder.checkpoints,
            checkpoint,
            identity=identity,
            every_steps=plan.checkpoint_every_steps,
            say=self._say,
        )

        def open_outputs() -> None:
            if start_step:
                self._last_line = folder.cut_metrics(start_step) or {}
                self._wall_s_before = self._last_line.get("wall_s", 0.0)
            else:
                folder.metrics.unlink(missing_ok=True)
            self._monitor = Monitor(
                folder,
                start_step=start_step,
                total_steps=plan.total_steps,
                tensorboard=tensorboard,
                config_yaml=config_yaml,
            )

        decided_by_rank_zero(open_outputs, engine.ranks)
        if self._monitor is None:
            return
        self._summarize("running", start_step)
        going_on = resumed_from is not None and start_step > 0
        source = f"going on from {resumed_from}" if going_on else f"starting from {begins_from}"
        self._monitor.say(f"{folder.path}: {source}, step {start_step} of {plan.total_steps}")
        if held_out is None and advice:
            self._monitor.say(advice)

    def beat(self, doing: str) -> None:
        """Tells the watchdog that this rank goes on."""
        self._watchdog.beat(doing)

    def patient(self, doing: str) -> AbstractContextManager[None]:
        """While it is open this rank does one long thing."""
        return self._watchdog.patient(doing)

    def stop_requested(self) -> bool:
        """True once this rank was asked to stop."""
        return bool(self._stop)

    def save_due(self) -> bool:
        """True on rank 0 once `checkpoint.every_minutes` have gone by since the last save."""
        return self._saver.due()

    def note_damage(self, step: int, found: Sequence[Damage]) -> int:
        """Takes the damaged samples of a micro-batch; returns how many are new to this rank."""
        return self._quarantine.note(step, found)

    def share_damage(self) -> None:
        """Tells all ranks, the list and people of what is new to any; collective.

        Raises:
            TrainingFailed: on all ranks, if there are more than allowed.
        """
        new, told = self._quarantine.exchange(), self._quarantine
        for damage in new:
            self._warn(f"warning: another image takes the place of {damage}")
        if told.exceeded:
            # The list is complete before any rank leaves, and a launcher ends the others.
            barrier(self._engine.ranks)
            raise TrainingFailed(
                f"{len(told.samples):,} of {self._plan.num_samples:,} samples are damaged, "
                f"data.damage_budget={told.share:g} allows {told.allowed:,}: {told.path} lists them. Mend the shards "
                f"(see `mae-vit check {self._data_folder}`) or raise the budget; the same command goes on"
            )

    def _warn(self, line: str) -> None:
        self._warnings += 1
        if self._monitor is not None and self._warnings <= _MAX_WARNINGS:
            self._monitor.say(line)
            if self._warnings == _MAX_WARNINGS:
                self._monitor.say(f"further damaged samples: see {self._quarantine.path}")

    def evaluate(self, step: int) -> dict[str, float]:
        """Measures held-out images and draws the probe images; collective."""
        if self._held_out is None:
            return {}
        with self._watchdog.patient("measuring held-out images"), self._engine.whole():
            metrics = self._held_out.evaluate(self._engine)
            if self._selects is not None:
                self._keep_best(step, metrics[self._selects])
            if self._monitor is not None:
                self._monitor.show(self._held_out.pictures(self._engine), step)
        return metrics

    def _keep_best(self, step: int, score: float) -> None:
        """Of equal scores the first; all ranks choose alike, rank 0 keeps the weights."""
        if self.best is None or score > self.best.score:
            writes = self._engine.ranks.rank == 0
            self.best = Best(step, score, weights_of(self._engine.objective) if writes else {})

    def probe(self) -> dict[str, float]:
        """Scores the frozen features; collective."""
        if self._probe is None:
            return {}
        with self._watchdog.patient("probing"), self._engine.whole():
            return self._probe.evaluate(self._engine)

    def inspect(self, step: int) -> None:
        """Draws views of the encoder for TensorBoard; collective."""
        if self._held_out is None or self._views is None:
            return
        with self._watchdog.patient("drawing views"), self._engine.whole():
            if self._monitor is not None:
                images = self._held_out.shown.images.to(self._engine.device)
                self._monitor.show_views(self._views(self._engine.objective, images), step)

    def log(self, line: dict[str, Any]) -> None:
        """Writes a line of metrics; its wall time counts all sittings of the run."""
        line["wall_s"] += self._wall_s_before
        if self._saver.stall_s:
            line["save_stall_s"] = self._saver.stall_s
            self._saver.stall_s = 0.0
        self._last_line = line
        if self._monitor is not None:
            self._monitor.log_step(line)
            if self._judge is not None and (said := self._judge(line)):
                self._monitor.say(said)

    def save(self, step: int, *, last: bool, stopping: bool) -> None:
        """Gathers the state from all ranks, writes it, and drops old checkpoints; collective.

        Raises:
            TrainingFailed: on all ranks, if the last state of the run, or too many in a row, could not be saved.
        """
        if self._monitor is not None:
            self._summarize("running", step)
        with self._watchdog.patient("saving"):
            saved = self._saver.save(step, self.best, self.guard.course, wait=last or stopping)
        if last and not saved:
            raise TrainingFailed(
                "the run's last state could not be saved: make room, then the same command goes on from the last "
                "good checkpoint"
            )

    def settle(self) -> None:
        """Waits for the save under way, whatever comes of it; collective."""
        with suppress(BadStep):
            self._saver.settle()

    def go_back(self, bad: BadStep, step: int, best: Best | None, guard: Guard) -> None:
        """Takes all outputs back to the checkpoint of `step`, which had these best weights."""
        self.best, self.guard = best, guard
        # What is on the disk is as new as can be.
        self._saver.restart_clock()
        if self._monitor is None:
            return
        self._last_line = self._folder.cut_metrics(step) or {}
        self._wall_s_before = self._last_line.get("wall_s", 0.0)
        self._monitor.go_back(step)
        self._monitor.say(
            f"warning: {bad}; going back to step {step}, leaving out steps "
            f"{', '.join(f'{first}-{stop - 1}' for first, stop in guard.course.skipped)} of the data"
        )

    def end(self, status: Status, step: int | None, results: dict[str, Any] | None = None) -> None:
        """Says how the run ended, with what came of it, and closes its outputs."""
        self._saver.close()
        if self._monitor is None:
            return
        if status == "interrupted":
            self._monitor.say(f"stopping on {self._stop.reason or 'the request of another rank'}")
        self._summarize(status, self._last_line.get("step", 0) if step is None else step, results or {})
        self._monitor.close()

    def _say(self, text: str) -> None:
        if self._monitor is not None:
            self._monitor.say(text)

    def _summarize(self, status: Status, step: int, results: dict[str, Any] | None = None) -> None:
        values: dict[str, Any] = {
            "steps": step,
            "total_steps": self._plan.total_steps,
            **self._facts,
            "samples": step * self._plan.effective_batch_size,
            **{name: self._last_line.get(name) for name in ("loss", "images_per_s", "wall_s")},
            **{name: self._last_line[name] for name in ("heldout", "probe") if name in self._last_line},
            **({"damaged_samples": damaged} if (damaged := len(self._quarantine.samples)) else {}),
            **(results or {}),
        }
        try:
            self._folder.write_summary(status, values)
        except OSError as error:
            # Others read from it whether the run is done: that must not fail in silence.
            if status == "done":
                raise
            self._say(f"warning: {self._folder.summary} cannot be written: {reason_of(error)}")


class Hooks(Protocol):
    """What the loop calls, on all ranks alike."""

    def beat(self, doing: str) -> None:
        """Hears that this rank goes on, and with what."""

    def stop_requested(self) -> bool:
        """True once this rank was asked to stop."""

    def save_due(self) -> bool:
        """True once this rank asks all of them for a save beside those of the plan."""

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
