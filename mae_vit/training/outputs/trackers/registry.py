"""Opens the trackers of a run and logs to all of them."""

from __future__ import annotations

import importlib.util
import json
import os
import pkgutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

from tqdm import tqdm

from mae_vit.config.load import dump_config
from mae_vit.config.schema import Config
from mae_vit.config.trackers import TRACKERS
from mae_vit.core.errors import InputError
from mae_vit.core.files import read_json_lines, write_json
from mae_vit.core.messages import error_reason
from mae_vit.core.urls import redact_url
from mae_vit.training.outputs.run_folder import RunFolder, Status
from mae_vit.training.outputs.trackers.base import (
    Pictures,
    Scalars,
    TrackedRun,
    Tracker,
    flatten,
    shown_scalars,
)
from mae_vit.training.outputs.trackers.tensorboard import TensorBoard

# Packages that the extra of the same name installs.
_PACKAGES = {"wandb": ("wandb",), "mlflow": ("mlflow", "sqlalchemy", "alembic")}
# Their values never appear in a message.
_SECRETS = ("WANDB_API_KEY", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN")
_URLS = ("WANDB_BASE_URL", "MLFLOW_TRACKING_URI")


def check_installed(trackers: Sequence[str]) -> None:
    """Checks that the packages of trackers are installed; imports none.

    Raises:
        InputError: with the command that installs the first missing one.
    """
    for tracker in trackers:
        for package in _PACKAGES.get(tracker, ()):
            if importlib.util.find_spec(package) is None:
                raise InputError(
                    f"monitor.trackers: {tracker} needs the package {package}: pip install 'mae-vit[{tracker}]'"
                )


class RunTrackers:
    """The trackers of a run. One that fails is dropped with a warning; training continues."""

    def __init__(self) -> None:
        """Starts without trackers."""
        self._trackers: list[Tracker] = []

    def log(self, step: int, scalars: Scalars, pictures: Pictures) -> None:
        """Logs the metrics and pictures of a step."""
        for tracker in [*self._trackers]:
            with self.guarded(tracker.title):
                tracker.log(step, scalars, pictures)

    def go_back(self, step: int) -> None:
        """Notes that the run rolled back to the checkpoint of `step`."""
        for tracker in [*self._trackers]:
            with self.guarded(tracker.title):
                tracker.go_back(step)

    def finish(self, status: Status, summary: Mapping[str, Any]) -> None:
        """Logs the run's summary and closes."""
        for tracker in [*self._trackers]:
            with self.guarded(tracker.title):
                tracker.finish(status, summary)

    def look(self) -> list[str]:
        """Returns the commands and URLs that show the run."""
        return [f"  watch     {tracker.where}" for tracker in self._trackers]

    def add(self, tracker: Tracker) -> None:
        """Adds a tracker."""
        self._trackers.append(tracker)

    @contextmanager
    def guarded(self, title: str) -> Iterator[None]:
        """Turns any exception of a tracker into a warning, and drops the tracker."""
        try:
            yield
        except (Exception, SystemExit) as error:
            self._trackers = [tracker for tracker in self._trackers if tracker.title != title]
            kind = "" if isinstance(error, OSError) else f"{type(error).__name__}: "
            reason = _without_secrets(kind + error_reason(error))
            tqdm.write(
                f"warning: {title} gets no more of this run: {reason}; training continues", file=sys.stderr
            )


def open_trackers(config: Config, folder: RunFolder, *, start_step: int) -> RunTrackers:
    """Opens TensorBoard and the experiment trackers of a run that begins or resumes at `start_step`.

    `folder` stores the ids of the tracked runs. A new tracked run gets all of `metrics.jsonl`.
    """
    trackers = RunTrackers()
    if config.monitor.tensorboard:
        with trackers.guarded(TensorBoard.title):
            trackers.add(
                TensorBoard(folder.tensorboard, start_step=start_step, config_yaml=dump_config(config))
            )
    if not config.monitor.trackers:
        return trackers
    ids = json.loads(folder.trackers.read_text()) if folder.trackers.exists() else {}
    lines = read_json_lines(folder.metrics) if folder.metrics.exists() else []
    run = describe_run(config, folder)
    for name in config.monitor.trackers:
        with trackers.guarded(name):
            make = TRACKERS[name]
            make = pkgutil.resolve_name(make) if isinstance(make, str) else make
            tracker: Tracker = make(replace(run, run_id=ids.get(name)))
            trackers.add(tracker)
            for line in lines if tracker.run_id != ids.get(name) else ():
                tracker.log(line["step"], shown_scalars(line), {})
            ids[name] = tracker.run_id
    write_json(folder.trackers, ids)
    return trackers


def describe_run(config: Config, folder: RunFolder) -> TrackedRun:
    """Describes a run to trackers; URLs lose their credentials."""
    values = {
        key: redact_url(value) if isinstance(value, str) else value
        for key, value in flatten(config.model_dump(mode="json")).items()
    }
    group, path = config.monitor.tracker_group, folder.path.absolute()
    # A comparison gives the runs of all its rows the same names.
    name = f"{path.parent.name}/{path.name}" if group else config.run.name
    return TrackedRun(name, group, folder.path, values)


def _without_secrets(text: str) -> str:
    """Masks keys, passwords and tokens from the environment."""
    secrets = [os.environ.get(name, "") for name in _SECRETS]
    secrets += [urlsplit(os.environ.get(name, "")).netloc.rpartition("@")[0] for name in _URLS]
    for secret in filter(None, secrets):
        text = text.replace(secret, "***")
    return text
