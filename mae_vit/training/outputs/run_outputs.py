"""The outputs of a run while it trains: metrics, pictures, summary, progress on the terminal."""

from __future__ import annotations

import resource
import sys
import time
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from PIL import Image
from tqdm import tqdm

from mae_vit.config.plan import Plan
from mae_vit.config.schema import Config
from mae_vit.core.image_rows import Picture, draw_rows
from mae_vit.core.messages import error_reason, format_duration, format_rate
from mae_vit.runtime.failures import BadStep
from mae_vit.runtime.ranks import Ranks, run_on_rank_zero
from mae_vit.training.outputs.run_folder import RunFolder, Status
from mae_vit.training.outputs.trackers import RunTrackers, open_trackers, shown_scalars

_PROBE_AT_START = "probe_at_start"
# Lines whose rate foresees the time left.
_RECENT = 50


class RunOutputs:
    """The outputs of a run: all ranks call it, rank 0 (`writes`) writes."""

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
        """Opens the outputs of a run that begins or resumes at `start_step`; drops metrics of later steps; collective.

        `facts` are entries of every summary; `damaged` has the numbers of the damaged samples and grows during the run.
        """
        self.writes = ranks.rank == 0
        self._folder, self._plan, self._measured = folder, plan, config.measured_on
        self._facts, self._damaged = dict(facts), damaged
        self._last_line: dict[str, Any] = {}
        self._wall_s_before = 0.0
        self._trackers = RunTrackers()
        self._pictures: dict[str, np.ndarray] = {}  # of the step that is logged next
        # When lines were written, and their steps.
        self._recent: deque[tuple[float, int]] = deque(maxlen=_RECENT)
        self._failed: set[str] = set()
        self._stepped = False
        self._bar: tqdm[Any] | None = None

        def open_outputs() -> None:
            if start_step:
                self._cut_metrics(start_step)
            else:
                folder.metrics.unlink(missing_ok=True)
            # A run that resumes at step 0 keeps them too.
            if (scores := folder.read_summary().get(_PROBE_AT_START)) is not None:
                self._facts[_PROBE_AT_START] = scores
            self._trackers = open_trackers(config, folder, start_step=start_step)

        run_on_rank_zero(open_outputs, ranks)
        if self.writes and sys.stderr.isatty():
            self._bar = tqdm(total=plan.total_steps, initial=start_step, unit=" steps", dynamic_ncols=True)

    def _cut_metrics(self, step: int) -> None:
        self._last_line = self._folder.cut_metrics(step) or {}
        self._wall_s_before = self._last_line.get("wall_s", 0.0)

    def begin(self, step: int, source: str, advice: str) -> None:
        """Reports where the run begins, and writes the first summary."""
        self.summarize("running", step)
        self.say(f"{self._folder.path}: {source}, step {step} of {self._plan.total_steps}")
        if advice:
            self.say(advice)

    def note_first_probe(self, scores: Mapping[str, float]) -> None:
        """Adds the online probe's scores of the initial weights to every summary."""
        self._facts[_PROBE_AT_START] = dict(scores)
        shown = ", ".join(f"{name} {value:.4f}" for name, value in scores.items() if name != "images")
        self.say(f"step 0 online probe: {shown}")

    def say(self, text: str) -> None:
        """Prints a line without breaking the progress bar."""
        if self.writes:
            tqdm.write(text, file=sys.stderr)

    def show(self, rows: Sequence[Picture], step: int) -> None:
        """Writes labeled rows of images as a PNG, and passes them to trackers with the step's metrics."""
        if not self.writes:
            return
        picture = draw_rows(rows)
        with self._tolerant("pictures"):
            self._folder.pictures.mkdir(exist_ok=True)
            Image.fromarray(picture).save(self._folder.pictures / f"step-{step:08d}.png")
        self._pictures["pictures/held-out"] = picture

    def show_step(self, step: int, seconds: float) -> None:
        """Advances the progress bar on a terminal; in a log, prints the time of the first step."""
        if self._bar is not None:
            self._bar.update(step - self._bar.n)
        elif not self._stepped:
            self.say(f"first step took {seconds:.1f} s")
        self._stepped = True

    def log(self, line: dict[str, Any]) -> None:
        """Writes and shows a line of metrics; its wall time includes earlier processes of the run."""
        line["wall_s"] += self._wall_s_before
        self._last_line = line
        if not self.writes:
            return
        with self._tolerant("metrics"):
            self._folder.append_metrics(line)
        self._trackers.each(lambda tracker: tracker.log(line["step"], shown_scalars(line), self._pictures))
        self._pictures = {}
        for group, title in (("heldout", self._measured), ("probe", "online probe")):
            if group in line:
                shown = ", ".join(f"{name} {value:.4f}" for name, value in line[group].items())
                self.say(f"step {line['step']} {title}: {shown}")
        loss = "overflow" if line["loss"] is None else f"{line['loss']:.4f}"
        rate = f"{format_rate(line['images_per_s'])} images/s"
        if self._bar is not None:
            self._bar.set_postfix_str(f"batch loss {loss}, {rate}")
        else:
            self.say(
                f"step {line['step']}/{self._plan.total_steps} epoch {line['epoch']:.2f} batch loss {loss} "
                f"lr {line['lr']:.2e} {rate}{self._eta(line['step'])}"
            )

    def _eta(self, step: int) -> str:
        """Estimates the time left from the steps between recent lines, including evaluation and saves.

        Steps before the first line do not count: they allocate memory and compile graphs.
        """
        now = time.monotonic()
        self._recent.append((now, step))
        since, first = self._recent[0]
        if step == first:
            return ""
        return f" eta {format_duration((now - since) / (step - first) * (self._plan.total_steps - step))}"

    @contextmanager
    def _tolerant(self, what: str) -> Iterator[None]:
        """Turns disk errors into a warning, one for each kind of output: training continues without these files."""
        try:
            yield
        except OSError as error:
            if what not in self._failed:
                self._failed.add(what)
                reason = error_reason(error)
                self.say(
                    f"warning: {what} of {self._folder.path} cannot be written: {reason}; training continues"
                )

    def go_back(self, bad: BadStep, step: int, skipped: Sequence[tuple[int, int]]) -> None:
        """Rolls outputs back to the checkpoint of `step`, and prints why; `skipped`: windows of data steps."""
        if not self.writes:
            return
        self._cut_metrics(step)
        self._recent.clear()
        self._pictures = {}
        self._trackers.each(lambda tracker: tracker.go_back(step))
        if self._bar is not None:
            self._bar.n = step
            self._bar.refresh()
        self.say(
            f"warning: {bad}; going back to step {step}, leaving out steps "
            f"{', '.join(f'{first}-{stop - 1}' for first, stop in skipped)} of the data"
        )

    def end(self, status: Status, step: int | None, results: dict[str, Any] | None = None) -> None:
        """Writes the last summary, with `results`, and closes; `step` defaults to that of the last line."""
        if not self.writes:
            return
        last = self._last_line.get("step", 0) if step is None else step
        self.summarize(status, last, results)
        if self._bar is not None:
            self._bar.close()
        self._trackers.each(lambda tracker: tracker.finish(status, self._summary(last, results)))

    def summarize(self, status: Status, step: int, results: dict[str, Any] | None = None) -> None:
        """Writes `summary.json`, on rank 0."""
        if not self.writes:
            return
        try:
            self._folder.write_summary(status, self._summary(step, results))
        except OSError as error:
            # A comparison reads from it whether the run is done: this must not fail silently.
            if status == "done":
                raise
            self.say(f"warning: {self._folder.summary} cannot be written: {error_reason(error)}")

    def _summary(self, step: int, results: dict[str, Any] | None) -> dict[str, Any]:
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
        """Returns lines that name the latest picture, the metrics, and where trackers show the run."""
        pictures = sorted(self._folder.pictures.glob("step-*.png"))
        lines = [f"  pictures  {pictures[-1]}"] if pictures else []
        watch = [f"  watch     {tracker.where}" for tracker in self._trackers.trackers]
        return [*lines, f"  metrics   {self._folder.metrics}", *watch]


def peak_memory_gib(device: torch.device) -> float:
    """Returns this rank's peak memory: GPU allocations, or the resident set on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    unit = 1 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
