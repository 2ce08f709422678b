"""What a person sees of a run: TensorBoard, pictures, the terminal. Rank 0 only.

The only file that imports TensorBoard.
"""

from __future__ import annotations

import logging
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from tqdm import tqdm

from mae_vit.core.image_rows import Picture, draw_rows
from mae_vit.core.messages import error_reason, format_duration
from mae_vit.training.outputs.run_folder import RunFolder

# Where TensorBoard shows what is no metric of the objective.
_GROUPS = {
    "lr": "optimizer",
    "grad_norm": "optimizer",
    "loss_scale": "optimizer",
    "skipped_steps": "optimizer",
    "images_per_s": "speed",
    "data_wait_frac": "speed",
    "mfu": "speed",
    "peak_memory_gib": "speed",
    "save_stall_s": "speed",
}
# The page "Custom scalars": what a person looks at first.
_LAYOUT = {
    "is it learning?": {
        "loss": ["Multiline", ["train/loss", "heldout/loss"]],
        "held-out images": ["Multiline", ["heldout/(?!loss)"]],
        "online probe": ["Multiline", ["probe/.*top1"]],
    },
    "is it fast?": {
        "images per second": ["Multiline", ["speed/images_per_s"]],
        "share of time waiting for data": ["Multiline", ["speed/data_wait_frac"]],
    },
}


class Monitor:
    """Writes metrics, TensorBoard and pictures, and shows progress."""

    def __init__(
        self, folder: RunFolder, *, start_step: int, total_steps: int, tensorboard: bool, config_yaml: str
    ) -> None:
        """Opens the outputs of a run that begins or resumes at `start_step`."""
        self._folder = folder
        self._failed: set[str] = set()
        self._first: tuple[float, int] | None = None  # when the first line was written, and its step
        self._writer: Any = None
        if tensorboard:
            self._writer = _open_writer(folder.tensorboard, purge_step=start_step + 1 if start_step else None)
            if start_step == 0:
                self._writer.add_text("config", f"```yaml\n{config_yaml}\n```", 0)
                self._writer.add_custom_scalars(_LAYOUT)
        self._total_steps = total_steps
        self._bar = None
        if sys.stderr.isatty():
            self._bar = tqdm(total=total_steps, initial=start_step, unit=" steps", dynamic_ncols=True)

    def log_step(self, line: dict[str, Any]) -> None:
        """Writes a line of metrics and shows it."""
        with self._tolerant("metrics"):
            self._folder.append_metrics(line)
        for group in dict.fromkeys(_GROUPS.get(name, "train") for name in line):
            own = {name: value for name, value in line.items() if _GROUPS.get(name, "train") == group}
            self._scalars(group, own, line["step"])
        for group, title in (("heldout", "held-out images"), ("probe", "online probe")):
            if group in line:
                self._scalars(group, line[group], line["step"])
                shown = ", ".join(f"{name} {value:.4f}" for name, value in line[group].items())
                self.say(f"step {line['step']} {title}: {shown}")
        if self._bar is not None:
            shown = f"loss {_shown(line['loss'])}, {line['images_per_s']:.0f} images/s"
            self._bar.set_postfix_str(shown, refresh=False)
            self._bar.update(line["step"] - self._bar.n)
        else:
            print(
                f"step {line['step']}/{self._total_steps} epoch {line['epoch']:.2f} loss {_shown(line['loss'])} "
                f"lr {line['lr']:.2e} {line['images_per_s']:.0f} images/s{self._eta(line['step'])}",
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
        """Writes labeled rows of images as a PNG and to TensorBoard."""
        picture = draw_rows(rows)
        with self._tolerant("pictures"):
            self._folder.pictures.mkdir(exist_ok=True)
            Image.fromarray(picture).save(self._folder.pictures / f"step-{step:08d}.png")
        if self._writer is not None:
            with self._tolerant("TensorBoard"):
                self._writer.add_image("pictures/held-out", picture, step, dataformats="HWC")

    def show_views(self, views: Mapping[str, np.ndarray], step: int) -> None:
        """Writes pictures uint8 (H, W, 3) to TensorBoard, by name."""
        if self._writer is not None:
            with self._tolerant("TensorBoard"):
                for name, picture in views.items():
                    self._writer.add_image(f"inspect/{name}", picture, step, dataformats="HWC")

    def go_back(self, step: int) -> None:
        """Forgets all after `step`, and marks it."""
        self._first = None
        if self._writer is not None:
            with self._tolerant("TensorBoard"):
                self._writer.close()
                self._writer = _open_writer(self._folder.tensorboard, purge_step=step + 1)
                self._writer.add_scalar("guard/went_back_to_step", step, step + 1)
        if self._bar is not None:
            self._bar.n = step
            self._bar.refresh()

    def say(self, text: str) -> None:
        """Prints a line without breaking the progress bar."""
        tqdm.write(text, file=sys.stderr)

    def close(self) -> None:
        """Closes the outputs."""
        if self._bar is not None:
            self._bar.close()
        if self._writer is not None:
            with self._tolerant("TensorBoard"):
                self._writer.close()

    @contextmanager
    def _tolerant(self, what: str) -> Iterator[None]:
        """A full disk takes nothing from a run but what people look at; it is told once for each kind."""
        try:
            yield
        except OSError as error:
            if what not in self._failed:
                self._failed.add(what)
                reason = error_reason(error)
                self.say(
                    f"warning: {what} of {self._folder.path} cannot be written: {reason}; training continues"
                )

    def _scalars(self, group: str, values: dict[str, Any], step: int) -> None:
        if self._writer is None:
            return
        with self._tolerant("TensorBoard"):
            for name, value in values.items():
                if isinstance(value, int | float) and name not in ("step", "epoch", "samples", "wall_s"):
                    self._writer.add_scalar(f"{group}/{name}", value, step)


def write_hparams(folder: Path, runs: Mapping[str, tuple[Mapping[str, Any], Mapping[str, float]]]) -> None:
    """Writes the table of TensorBoard's page "HParams" anew: a line for each run.

    Args:
        folder: of nothing else.
        runs: by a name for people, what sets each apart and what came of it.
    """
    shutil.rmtree(folder, ignore_errors=True)
    for name, (facts, scores) in runs.items():
        writer = _open_writer(folder / name, purge_step=None)
        writer.add_hparams(dict(facts), dict(scores), run_name=".")
        writer.close()


def _open_writer(path: Path, purge_step: int | None) -> Any:
    # Importing TensorBoard takes a second: only where it is written.
    logging.getLogger("tensorboard").setLevel(logging.ERROR)
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(path), purge_step=purge_step)


def _shown(loss: float | None) -> str:
    return "overflow" if loss is None else f"{loss:.4f}"
