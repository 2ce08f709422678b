"""Opens what a run is written to, and keeps the ids by which trackers resume it."""

from __future__ import annotations

import importlib.util
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from mae_vit.config.load import dump_config
from mae_vit.config.schema import Config
from mae_vit.core.errors import InputError
from mae_vit.core.files import read_json_lines, write_json
from mae_vit.core.urls import redact_url
from mae_vit.training.outputs.run_folder import RunFolder
from mae_vit.training.outputs.trackers.background import BackgroundTracker
from mae_vit.training.outputs.trackers.base import RemoteRun, TrackedRun, Tracker, flatten
from mae_vit.training.outputs.trackers.mlflow_run import MlflowRun
from mae_vit.training.outputs.trackers.names import scalars_of
from mae_vit.training.outputs.trackers.tensorboard import TensorBoard
from mae_vit.training.outputs.trackers.wandb_run import WandbRun

_OPEN: dict[str, Callable[[TrackedRun, str | None], RemoteRun]] = {"wandb": WandbRun, "mlflow": MlflowRun}
# An id comes from a file, and becomes part of a path.
_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")


def check_installed(trackers: Sequence[str]) -> None:
    """Checks that the packages of trackers are installed; imports none.

    Raises:
        InputError: with the command that installs the first missing one.
    """
    needed = {"wandb": ["wandb"], "mlflow": ["mlflow"]}
    if not os.environ.get("MLFLOW_TRACKING_URI"):
        needed["mlflow"] += ["sqlalchemy", "alembic"]  # for the local database
    for tracker in trackers:
        if missing := [name for name in needed[tracker] if importlib.util.find_spec(name) is None]:
            raise InputError(
                f"monitor.trackers: {tracker} needs the package {missing[0]}: pip install 'mae-vit[{tracker}]'"
            )


def open_trackers(
    config: Config, folder: RunFolder, *, start_step: int, logged_step: int, say: Callable[[str], None]
) -> list[Tracker]:
    """Opens TensorBoard and the experiment trackers of a run, which get what they lack of `metrics.jsonl`.

    Args:
        config: of the run.
        folder: of the run; its metrics end at `start_step`.
        start_step: steps done before.
        logged_step: the last step that was logged before, which may be a later one.
        say: prints a line.
    """
    trackers: list[Tracker] = []
    if config.monitor.tensorboard:
        trackers.append(
            TensorBoard(folder.tensorboard, start_step=start_step, config_yaml=dump_config(config))
        )
    if not config.monitor.trackers:
        return trackers
    ids, run = read_ids(folder), describe_run(config, folder)
    lines = read_json_lines(folder.metrics) if folder.metrics.exists() else []
    for name in config.monitor.trackers:
        tracker = BackgroundTracker(
            name, partial(_OPEN[name], run, ids.get(name)), logged_step=logged_step, say=say
        )
        if tracker.run_id is not None:
            ids[name] = tracker.run_id
        for line in lines:
            tracker.log(line["step"], scalars_of(line), {})
        trackers.append(tracker)
    write_json(folder.trackers, ids)
    return trackers


def describe_run(config: Config, folder: RunFolder) -> TrackedRun:
    """Describes a run to trackers; URLs lose their credentials."""
    values = {
        key: redact_url(value) if isinstance(value, str) else value
        for key, value in flatten(config.model_dump(mode="json")).items()
    }
    group, path = config.monitor.tracker_group, folder.path.absolute()
    # A comparison calls the cells of all its rows alike.
    name = f"{path.parent.name}/{path.name}" if group else config.run.name
    return TrackedRun(name, group, folder.path, values)


def read_ids(folder: RunFolder) -> dict[str, str]:
    """Reads the ids of a run by tracker; empty without any."""
    try:
        return valid_ids(json.loads(folder.trackers.read_text()))
    except (OSError, ValueError):
        return {}


def adopt_ids(folder: RunFolder, found: Mapping[str, str] | None, *, origin: RunFolder | None = None) -> None:
    """Prepares a run folder: a new run has no ids, one from another machine those of its checkpoint.

    A run that branches off from another has none: in one tracked run the steps of both would mix.

    Args:
        folder: of the run.
        found: the ids in the checkpoint that it resumes from; None for a new run.
        origin: the folder that the checkpoint lies in. If it still has its ids, it is another run.
    """
    if found is None:
        folder.trackers.unlink(missing_ok=True)
    elif found and not folder.trackers.exists() and not (origin and origin.trackers.exists()):
        write_json(folder.trackers, dict(found))


def valid_ids(values: Any) -> dict[str, str]:
    """Returns what has the form of ids by tracker."""
    if not isinstance(values, dict):
        return {}
    return {name: value for name, value in values.items() if name in _OPEN and _ID.fullmatch(str(value))}
