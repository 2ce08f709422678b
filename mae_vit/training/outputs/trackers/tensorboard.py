"""Writes a run to TensorBoard's event files. The only file that imports TensorBoard."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mae_vit.training.outputs.run_folder import Status
from mae_vit.training.outputs.trackers.base import ROLLED_BACK, Pictures, Scalars

# The page "Custom scalars".
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


class TensorBoard:
    """TensorBoard's files of one run. A rollback hides later steps."""

    title = "TensorBoard"
    run_id = ""

    def __init__(self, folder: Path, *, start_step: int, config_yaml: str) -> None:
        """Opens the files of a run that begins or resumes at `start_step`."""
        self._folder = folder
        self.where = f"tensorboard --logdir {folder.parent.parent}"
        self._writer = _open_writer(folder, purge_step=start_step + 1 if start_step else None)
        if start_step == 0:
            self._writer.add_text("config", f"```yaml\n{config_yaml}\n```", 0)
            self._writer.add_custom_scalars(_LAYOUT)

    def log(self, step: int, scalars: Scalars, pictures: Pictures) -> None:
        """Writes the metrics and pictures of a step."""
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)
        for name, picture in pictures.items():
            self._writer.add_image(name, picture, step, dataformats="HWC")

    def go_back(self, step: int) -> None:
        """Hides all steps after `step`, and marks the rollback."""
        self._writer.close()
        self._writer = _open_writer(self._folder, purge_step=step + 1)
        self._writer.add_scalar(ROLLED_BACK, step, step + 1)

    def finish(self, status: Status, summary: Mapping[str, Any]) -> None:
        """Closes the files."""
        self._writer.close()


def _open_writer(path: Path, purge_step: int | None) -> Any:
    # Importing TensorBoard takes a second: import it only when needed.
    logging.getLogger("tensorboard").setLevel(logging.ERROR)
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(path), purge_step=purge_step)
