"""What follows a run: the interface of trackers, opening them, logging to all of them; TensorBoard."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import pkgutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote
from typing import Any, Protocol
from urllib.parse import urlsplit

import numpy as np
from tqdm import tqdm

from mae_vit.config.load import dump_config
from mae_vit.config.schema import TRACKERS, Config
from mae_vit.core.errors import InputError
from mae_vit.core.files import read_json_lines, write_json
from mae_vit.core.messages import error_reason
from mae_vit.core.urls import redacted
from mae_vit.training.identity import flatten
from mae_vit.training.outputs.run_folder import RunFolder, Status

# By name as TensorBoard shows it: "train/loss".
Scalars = Mapping[str, float]
# By name; uint8 (H, W, 3).
Pictures = Mapping[str, np.ndarray]
ROLLED_BACK = "guard/went_back_to_step"
# Groups of the values that are not metrics of the objective.
_GROUPS = {
    **dict.fromkeys(("lr", "grad_norm", "loss_scale", "skipped_steps"), "optimizer"),
    **dict.fromkeys(("images_per_s", "data_wait_frac", "mfu", "peak_memory_gib", "save_stall_s"), "speed"),
}
_NESTED = ("heldout", "probe")
# Positions in the run, not metrics.
_NOT_SHOWN = ("step", "epoch", "samples", "wall_s")


class Tracker(Protocol):
    """Receives the metrics and pictures of a run, on rank 0. If a method raises, the run continues without it.

    Attributes:
        title: name in messages.
        where: command or URL that shows the run.
        run_id: id in the tracker's store, by which a resumed run continues; empty without a store.
    """

    title: str
    where: str
    run_id: str

    def log(self, step: int, scalars: Scalars, pictures: Pictures) -> None:
        """Stores the metrics and pictures of a step. A step may repeat after a rollback or a resume."""

    def go_back(self, step: int) -> None:
        """Records that the run rolled back to the checkpoint of `step`; by default with the first step after it."""
        self.log(step + 1, {ROLLED_BACK: step}, {})

    def finish(self, status: Status, summary: Mapping[str, Any]) -> None:
        """Stores the run's summary and closes."""


@dataclass(frozen=True)
class TrackedRun:
    """Describes a run to an experiment tracker.

    Attributes:
        config: values by dotted key, without credentials.
        run_id: id of the tracked run to continue; None creates a new one.
    """

    name: str
    folder: Path
    config: Mapping[str, Any]
    run_id: str | None = None


def shown_scalars(line: Mapping[str, Any]) -> dict[str, float]:
    """Returns the numbers in a line of `metrics.jsonl` by display name: `train/loss`, `heldout/loss`."""
    values = {
        f"{_GROUPS.get(name, 'train')}/{name}": value
        for name, value in line.items()
        if name not in (*_NOT_SHOWN, *_NESTED)
    }
    for group in _NESTED:
        values |= {f"{group}/{name}": value for name, value in line.get(group, {}).items()}
    return {name: value for name, value in values.items() if isinstance(value, int | float)}


# Packages that the extra of the same name installs.
_PACKAGES = {"wandb": ("wandb",), "mlflow": ("mlflow", "sqlalchemy", "alembic")}
# Their values never appear in a message.
_SECRETS = ("WANDB_API_KEY", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN")
_URLS = ("WANDB_BASE_URL", "MLFLOW_TRACKING_URI")


def check_installed(trackers: Sequence[str]) -> None:
    """Raises InputError, with the command that installs the first missing package of trackers; imports none."""
    for tracker in trackers:
        for package in _PACKAGES.get(tracker, ()):
            if importlib.util.find_spec(package) is None:
                raise InputError(
                    f"monitor.trackers: {tracker} needs the package {package}; pip install 'mae-vit[{tracker}]'"
                )


class RunTrackers:
    """The trackers of a run. One that fails is dropped with a warning; training continues."""

    def __init__(self) -> None:
        self.trackers: list[Tracker] = []

    def each(self, call: Callable[[Tracker], None]) -> None:
        """Calls a method of all trackers."""
        for tracker in [*self.trackers]:
            with self.guarded(tracker.title):
                call(tracker)

    @contextmanager
    def guarded(self, title: str) -> Iterator[None]:
        """Turns any exception of a tracker into a warning, and drops the tracker."""
        try:
            yield
        except (Exception, SystemExit) as error:
            self.trackers = [tracker for tracker in self.trackers if tracker.title != title]
            kind = "" if isinstance(error, OSError) else f"{type(error).__name__}: "
            reason = _without_secrets(kind + error_reason(error))
            tqdm.write(
                f"warning: nothing more is sent to {title} ({reason}); training continues", file=sys.stderr
            )


def open_trackers(config: Config, folder: RunFolder, *, start_step: int) -> RunTrackers:
    """Opens TensorBoard and the experiment trackers of a run that begins or resumes at `start_step`.

    `folder` stores the ids of the tracked runs. A new tracked run gets all of `metrics.jsonl`.
    """
    trackers = RunTrackers()
    if config.monitor.tensorboard:
        with trackers.guarded(TensorBoard.title):
            board = TensorBoard(folder.tensorboard, start_step=start_step, config_yaml=dump_config(config))
            trackers.trackers.append(board)
    if not config.monitor.trackers:
        return trackers
    ids = json.loads(folder.trackers.read_text()) if folder.trackers.exists() else {}
    lines = read_json_lines(folder.metrics) if folder.metrics.exists() else []
    values = flatten(redacted(config.model_dump(mode="json")))
    run = TrackedRun(config.run.name, folder.path, values)
    for name in config.monitor.trackers:
        with trackers.guarded(name):
            make = TRACKERS[name]
            make = pkgutil.resolve_name(make) if isinstance(make, str) else make
            tracker: Tracker = make(replace(run, run_id=ids.get(name)))
            trackers.trackers.append(tracker)
            for line in lines if tracker.run_id != ids.get(name) else ():
                tracker.log(line["step"], shown_scalars(line), {})
            ids[name] = tracker.run_id
    write_json(folder.trackers, ids)
    return trackers


def _without_secrets(text: str) -> str:
    """Masks keys, passwords and tokens from the environment."""
    secrets = [os.environ.get(name, "") for name in _SECRETS]
    secrets += [urlsplit(os.environ.get(name, "")).netloc.rpartition("@")[0] for name in _URLS]
    for secret in filter(None, secrets):
        text = text.replace(secret, "***")
    return text


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
        self._folder = folder
        self.where = f"tensorboard --logdir {quote(str(folder.parent.parent))}"
        self._writer = _open_writer(folder, purge_step=start_step + 1)
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


def _open_writer(path: Path, purge_step: int) -> Any:
    # Importing TensorBoard takes a second: import it only when needed.
    logging.getLogger("tensorboard").setLevel(logging.ERROR)
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(path), purge_step=purge_step)
