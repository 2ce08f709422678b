"""What a person sees of a run: the terminal, pictures, TensorBoard and experiment trackers. Rank 0 only."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from PIL import Image
from tqdm import tqdm

from mae_vit.core.image_rows import Picture, draw_rows
from mae_vit.core.messages import error_reason, format_duration, format_rate
from mae_vit.training.outputs.run_folder import RunFolder, Status
from mae_vit.training.outputs.trackers.names import scalars_of
from mae_vit.training.outputs.trackers.registry import RunTrackers


class Monitor:
    """Writes metrics and pictures to the run folder and to trackers, and shows progress."""

    def __init__(
        self, folder: RunFolder, trackers: RunTrackers, *, start_step: int, total_steps: int
    ) -> None:
        """Shows a run that begins or resumes at `start_step`."""
        self._folder = folder
        self._failed: set[str] = set()
        self._first: tuple[float, int] | None = None  # when the first line was written, and its step
        self._trackers = trackers
        self._pictures: dict[str, np.ndarray] = {}  # of the step that is logged next
        self._total_steps = total_steps
        self._stepped = False
        self._bar = None
        if sys.stderr.isatty():
            self._bar = tqdm(total=total_steps, initial=start_step, unit=" steps", dynamic_ncols=True)

    def show_step(self, step: int, seconds: float) -> None:
        """Shows that a step is done: on a terminal by the bar; in a log the first one of a process alone, in a line.

        Args:
            step: steps done.
            seconds: that it took.
        """
        if self._bar is not None:
            self._bar.update(step - self._bar.n)
        elif not self._stepped:
            self.say(f"first step took {seconds:.1f} s")
        self._stepped = True

    def log_step(self, line: dict[str, Any]) -> None:
        """Writes a line of metrics and shows it."""
        with self._tolerant("metrics"):
            self._folder.append_metrics(line)
        self._trackers.log(line["step"], scalars_of(line), self._pictures)
        self._pictures = {}
        for group, title in (("heldout", "held-out images"), ("probe", "online probe")):
            if group in line:
                shown = ", ".join(f"{name} {value:.4f}" for name, value in line[group].items())
                self.say(f"step {line['step']} {title}: {shown}")
        if self._bar is not None:
            shown = f"loss {_shown(line['loss'])}, {format_rate(line['images_per_s'])} images/s"
            self._bar.set_postfix_str(shown)
        else:
            print(
                f"step {line['step']}/{self._total_steps} epoch {line['epoch']:.2f} loss {_shown(line['loss'])} "
                f"lr {line['lr']:.2e} {format_rate(line['images_per_s'])} images/s{self._eta(line['step'])}",
                file=sys.stderr,
                flush=True,
            )

    def _eta(self, step: int) -> str:
        """The time left, from that of all steps since the first line, evaluation and saves among them.

        The first line tells none: its steps are those in which memory is allocated and graphs are compiled.
        """
        now = time.monotonic()
        if self._first is None:
            self._first = now, step
        since, first = self._first
        if step == first:
            return ""
        return f" eta {format_duration((now - since) / (step - first) * (self._total_steps - step))}"

    def show(self, rows: Sequence[Picture], step: int) -> None:
        """Writes labeled rows of images as a PNG, and to trackers with the step's metrics."""
        picture = draw_rows(rows)
        with self._tolerant("pictures"):
            self._folder.pictures.mkdir(exist_ok=True)
            Image.fromarray(picture).save(self._folder.pictures / f"step-{step:08d}.png")
        self._pictures["pictures/held-out"] = picture

    def show_views(self, views: Mapping[str, np.ndarray]) -> None:
        """Writes pictures uint8 (H, W, 3), by name, to trackers with the step's metrics."""
        self._pictures |= {f"inspect/{name}": picture for name, picture in views.items()}

    def go_back(self, step: int) -> None:
        """Forgets all after `step`, and marks it."""
        self._first, self._pictures = None, {}
        self._trackers.go_back(step)
        if self._bar is not None:
            self._bar.n = step
            self._bar.refresh()

    def say(self, text: str) -> None:
        """Prints a line without breaking the progress bar."""
        tqdm.write(text, file=sys.stderr)

    def look(self) -> list[str]:
        """Returns lines that state where trackers show the run."""
        return self._trackers.look()

    def close(self, status: Status, summary: Mapping[str, Any]) -> None:
        """Closes the outputs; trackers get the run's summary."""
        if self._bar is not None:
            self._bar.close()
        self._trackers.finish(status, summary)

    @contextmanager
    def _tolerant(self, what: str) -> Iterator[None]:
        """A full disk takes nothing from a run but what people look at; a warning is printed once for each kind."""
        try:
            yield
        except OSError as error:
            if what not in self._failed:
                self._failed.add(what)
                reason = error_reason(error)
                self.say(
                    f"warning: {what} of {self._folder.path} cannot be written: {reason}; training continues"
                )


def _shown(loss: float | None) -> str:
    return "overflow" if loss is None else f"{loss:.4f}"
