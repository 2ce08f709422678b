"""The interface of everything that a run is logged to: TensorBoard and experiment trackers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from mae_vit.training.outputs.run_folder import Status

# By name, as TensorBoard shows them: "train/loss".
Scalars = Mapping[str, float]
# By name; uint8 (H, W, 3).
Pictures = Mapping[str, np.ndarray]


class Tracker(Protocol):
    """Receives what a run logs, on rank 0. Its methods may raise: the run then goes on without it.

    Attributes:
        title: its name in messages.
        where: the command or the URL that shows the run.
    """

    title: str
    where: str

    def log(self, step: int, scalars: Scalars, pictures: Pictures) -> None:
        """Stores the metrics and the pictures of a step. After a rollback or a resume, a step may come again."""

    def go_back(self, step: int) -> None:
        """Notes that the run rolled back to the checkpoint of `step`."""

    def finish(self, status: Status, summary: Mapping[str, Any]) -> None:
        """Stores the run's summary and closes."""


class ExperimentTracker(Tracker, Protocol):
    """A tracker with a store of its own, in which a resumed run continues the same tracked run.

    Attributes:
        run_id: the tracked run's id in that store.
    """

    run_id: str


@dataclass(frozen=True)
class TrackedRun:
    """Describes a run to an experiment tracker.

    Attributes:
        name: shown by the tracker.
        group: of a comparison; None without one.
        folder: of the run.
        config: by dotted key, without credentials.
        run_id: of the tracked run to continue; None begins a new one.
    """

    name: str
    group: str | None
    folder: Path
    config: Mapping[str, Any]
    run_id: str | None = None


def flatten(values: Mapping[str, Any], prefix: str = "", separator: str = ".") -> dict[str, Any]:
    """Returns nested mappings as one mapping of joined keys."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{prefix}{separator}{key}" if prefix else str(key)
        flat |= flatten(value, name, separator) if isinstance(value, Mapping) else {name: value}
    return flat
