"""What a run reports while it trains: metrics, pictures, its summary and log lines."""

from __future__ import annotations

import resource
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from mae_vit.config.plan import Plan
from mae_vit.config.schema import Config
from mae_vit.core.image_rows import Picture
from mae_vit.core.messages import error_reason
from mae_vit.runtime.collectives import run_on_rank_zero
from mae_vit.runtime.failures import BadStep
from mae_vit.runtime.ranks import Ranks
from mae_vit.training.outputs.monitor import Monitor
from mae_vit.training.outputs.run_folder import RunFolder, Status
from mae_vit.training.outputs.trackers.registry import open_trackers

_PROBE_AT_START = "probe_at_start"


class RunOutputs:
    """The outputs of a run; all ranks call it, rank 0 writes."""

    def __init__(
        self,
        config: Config,
        plan: Plan,
        folder: RunFolder,
        ranks: Ranks,
        *,
        start_step: int,
        facts: Mapping[str, Any],
        damaged: Collection[int],
    ) -> None:
        """Opens the outputs of a run that begins or resumes at `start_step`; collective.

        Args:
            config: of the run.
            plan: its numbers.
            folder: where outputs go.
            ranks: all of which call it.
            start_step: steps done before; metrics of later ones are dropped.
            facts: go into every summary.
            damaged: numbers of the samples that are known to be damaged, updated during the run.
        """
        self._folder, self._plan = folder, plan
        self._facts, self._damaged = dict(facts), damaged
        self._last_line: dict[str, Any] = {}
        self._wall_s_before = 0.0
        self._monitor: Monitor | None = None

        def open_outputs() -> None:
            if start_step:
                self._last_line = folder.cut_metrics(start_step) or {}
                self._wall_s_before = self._last_line.get("wall_s", 0.0)
            else:
                folder.metrics.unlink(missing_ok=True)
            # Also of a run that resumes at step 0.
            if (known := folder.read_summary().get(_PROBE_AT_START)) is not None:
                self._facts[_PROBE_AT_START] = known
            trackers = open_trackers(config, folder, start_step=start_step)
            self._monitor = Monitor(folder, trackers, start_step=start_step, total_steps=plan.total_steps)

        run_on_rank_zero(open_outputs, ranks)

    @property
    def writes(self) -> bool:
        """Whether this rank writes; others need not make what is shown."""
        return self._monitor is not None

    def begin(self, step: int, source: str, advice: str) -> None:
        """Says where the run begins, and leaves its first summary."""
        if not self.writes:
            return
        self.summarize("running", step)
        self.say(f"{self._folder.path}: {source}, step {step} of {self._plan.total_steps}")
        if advice:
            self.say(advice)

    def note_first_probe(self, scores: Mapping[str, float]) -> None:
        """Keeps in every summary what the online probe says of the weights that the run begins with."""
        self._facts[_PROBE_AT_START] = dict(scores)
        shown = ", ".join(f"{name} {value:.4f}" for name, value in scores.items() if name != "images")
        self.say(f"step 0 online probe: {shown}")

    def say(self, text: str) -> None:
        """Prints a line without breaking the progress bar."""
        if self._monitor is not None:
            self._monitor.say(text)

    def show(self, rows: Sequence[Picture], step: int) -> None:
        """Writes labeled rows of images."""
        if self._monitor is not None:
            self._monitor.show(rows, step)

    def show_views(self, views: Mapping[str, np.ndarray]) -> None:
        """Writes views of the encoder, uint8 (H, W, 3) by name."""
        if self._monitor is not None:
            self._monitor.show_views(views)

    def show_step(self, step: int, seconds: float) -> None:
        """Shows that step number `step` is done."""
        if self._monitor is not None:
            self._monitor.show_step(step, seconds)

    def log(self, line: dict[str, Any]) -> None:
        """Writes a line of metrics; its wall time counts all processes that the run had."""
        line["wall_s"] += self._wall_s_before
        self._last_line = line
        if self._monitor is not None:
            self._monitor.log_step(line)

    def go_back(self, bad: BadStep, step: int, skipped: Sequence[tuple[int, int]]) -> None:
        """Takes all outputs back to the checkpoint of `step`, and says why.

        Args:
            bad: the step that the run goes back from.
            step: steps done at the checkpoint.
            skipped: [first, stop) of the steps of data that are left out.
        """
        if self._monitor is None:
            return
        self._last_line = self._folder.cut_metrics(step) or {}
        self._wall_s_before = self._last_line.get("wall_s", 0.0)
        self._monitor.go_back(step)
        self._monitor.say(
            f"warning: {bad}; going back to step {step}, leaving out steps "
            f"{', '.join(f'{first}-{stop - 1}' for first, stop in skipped)} of the data"
        )

    def end(self, status: Status, step: int | None, results: dict[str, Any] | None = None) -> None:
        """Leaves the last summary, with what came of the run, and closes; without a step, that of the last line."""
        if self._monitor is None:
            return
        last = self._last_line.get("step", 0) if step is None else step
        self.summarize(status, last, results)
        self._monitor.close(status, self._summary_of(last, results))

    def summarize(self, status: Status, step: int, results: dict[str, Any] | None = None) -> None:
        """Writes `summary.json`, on rank 0."""
        if not self.writes:
            return
        try:
            self._folder.write_summary(status, self._summary_of(step, results))
        except OSError as error:
            # Others read from it whether the run is done: that must not fail in silence.
            if status == "done":
                raise
            self.say(f"warning: {self._folder.summary} cannot be written: {error_reason(error)}")

    def _summary_of(self, step: int, results: dict[str, Any] | None) -> dict[str, Any]:
        return {
            "steps": step,
            "total_steps": self._plan.total_steps,
            **self._facts,
            "samples": step * self._plan.effective_batch_size,
            **{name: self._last_line.get(name) for name in ("loss", "images_per_s", "wall_s")},
            **{name: self._last_line[name] for name in ("heldout", "probe") if name in self._last_line},
            **({"damaged_samples": len(self._damaged)} if self._damaged else {}),
            **(results or {}),
        }

    def files(self) -> list[str]:
        """Names what lies in the folder, and where trackers show the run."""
        lines = []
        if pictures := sorted(self._folder.pictures.glob("step-*.png")):
            lines.append(f"  pictures  {pictures[-1]}")
        lines.append(f"  metrics   {self._folder.metrics}")
        return lines + (self._monitor.look() if self._monitor is not None else [])


def peak_memory_gib(device: torch.device) -> float:
    """Peak memory of this rank: the GPU's allocations, or the process's resident set on CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
