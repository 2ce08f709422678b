"""What a person sees of a run: TensorBoard, pictures, the terminal. Rank 0 only.

The only file that imports TensorBoard.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw
from tqdm import tqdm

from mae_vit.objectives.base import Picture
from mae_vit.training.run_folder import RunFolder

# Small images are shown at this many pixels at least.
_MIN_SHOWN_PX = 64
_LABEL_PX = 14


class Monitor:
    """Writes metrics, TensorBoard and pictures, and shows progress."""

    def __init__(
        self, folder: RunFolder, *, start_step: int, total_steps: int, tensorboard: bool, config_yaml: str
    ) -> None:
        """Opens the outputs of a run that begins (or goes on) at `start_step`."""
        self._folder = folder
        self._failed: set[str] = set()
        self._writer: Any = None
        if tensorboard:
            self._writer = _open_writer(folder.tensorboard, purge_step=start_step + 1 if start_step else None)
            if start_step == 0:
                self._writer.add_text("config", f"```yaml\n{config_yaml}\n```", 0)
        self._total_steps = total_steps
        self._bar = None
        if sys.stderr.isatty():
            self._bar = tqdm(total=total_steps, initial=start_step, unit=" steps", dynamic_ncols=True)

    def log_step(self, line: dict[str, Any]) -> None:
        """Writes a line of metrics and shows it."""
        with self._tolerant("metrics"):
            self._folder.append_metrics(line)
        self._scalars("train", line, line["step"])
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
            images_left = line["samples"] / line["step"] * (self._total_steps - line["step"])
            left = images_left / line["images_per_s"]
            print(
                f"step {line['step']}/{self._total_steps} epoch {line['epoch']:.2f} loss {_shown(line['loss'])} "
                f"lr {line['lr']:.2e} {line['images_per_s']:.0f} images/s eta {_clock(left)}",
                file=sys.stderr,
                flush=True,
            )

    def show(self, rows: Sequence[Picture], step: int) -> None:
        """Writes labeled rows of images as a PNG and to TensorBoard."""
        picture = draw_rows(rows)
        with self._tolerant("pictures"):
            self._folder.pictures.mkdir(exist_ok=True)
            Image.fromarray(picture).save(self._folder.pictures / f"step-{step:08d}.png")
        if self._writer is not None:
            with self._tolerant("TensorBoard"):
                self._writer.add_image("pictures/probe", picture, step, dataformats="HWC")

    def go_back(self, step: int) -> None:
        """Forgets all after `step`, and marks it."""
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
                reason = (error.strerror or str(error)).lower()
                self.say(
                    f"warning: {what} of {self._folder.path} cannot be written: {reason}; training goes on"
                )

    def _scalars(self, group: str, values: dict[str, Any], step: int) -> None:
        if self._writer is None:
            return
        with self._tolerant("TensorBoard"):
            for name, value in values.items():
                if isinstance(value, int | float) and name not in ("step", "epoch", "samples", "wall_s"):
                    self._writer.add_scalar(f"{group}/{name}", value, step)


def _open_writer(path: Path, purge_step: int | None) -> Any:
    # Importing TensorBoard takes a second: only where it is written.
    logging.getLogger("tensorboard").setLevel(logging.ERROR)
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(path), purge_step=purge_step)


def draw_rows(rows: Sequence[Picture]) -> np.ndarray:
    """Draws one labeled row for each picture: uint8 (height, width, 3)."""
    tiles = []
    for row in rows:
        images = row.images.detach().float().cpu()
        if images.shape[1] == 1:
            images = images.expand(-1, 3, -1, -1)
        zoom = max(1, -(-_MIN_SHOWN_PX // min(images.shape[2:])))
        images = F.pad(F.interpolate(images, scale_factor=zoom, mode="nearest"), (1, 1, 1, 1), value=1.0)
        strip = (torch.cat(list(images), dim=2).clamp(0, 1) * 255).round().byte().permute(1, 2, 0).numpy()
        label = Image.new("RGB", (strip.shape[1], _LABEL_PX), "white")
        ImageDraw.Draw(label).text((2, 1), row.label, fill="black")
        tiles += [np.asarray(label), strip]
    return np.concatenate(tiles)


def _shown(loss: float | None) -> str:
    return "overflow" if loss is None else f"{loss:.4f}"


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}"
