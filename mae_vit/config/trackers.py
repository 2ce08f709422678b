"""The experiment trackers that `monitor.trackers` names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_HOME = "mae_vit.training.outputs.trackers"
# Each takes a `TrackedRun` and returns a `Tracker` (mae_vit/training/outputs/trackers/base.py). "module:Class" is
# imported when a run opens it.
TRACKERS: dict[str, str | Callable[[Any], Any]] = {
    "wandb": f"{_HOME}.wandb:WandbTracker",
    "mlflow": f"{_HOME}.mlflow:MlflowTracker",
}


def register_tracker(name: str, tracker: str | Callable[[Any], Any]) -> None:
    """Adds an experiment tracker. A plug-in calls it when it is imported.

    Raises:
        ValueError: if there is another of that name.
    """
    if TRACKERS.setdefault(name, tracker) is not tracker:
        raise ValueError(f'there is a tracker "{name}"')
