"""What the monitor writes a run to: TensorBoard and experiment trackers share one interface."""

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
    """Receives what a run logs, on rank 0.

    Attributes:
        title: names it in messages.
    """

    title: str

    def log(self, step: int, scalars: Scalars, pictures: Pictures) -> None:
        """Writes the metrics and the pictures of a step; called once for each log step."""

    def go_back(self, step: int) -> None:
        """Notes that the run rolled back to the checkpoint of `step`."""

    def finish(self, status: Status, summary: Mapping[str, Any]) -> None:
        """Writes the run's summary and closes."""

    def look(self) -> list[str]:
        """Returns lines that state where the run can be looked at."""


@dataclass(frozen=True)
class TrackedRun:
    """Describes a run to an experiment tracker.

    Attributes:
        name: shown by the tracker.
        group: of a comparison; None without one.
        folder: of the run.
        config: by dotted key, without credentials.
    """

    name: str
    group: str | None
    folder: Path
    config: Mapping[str, Any]


class RemoteRun(Protocol):
    """A run that a tracker's package has opened. Its methods may raise, and may take any time.

    Attributes:
        run_id: by which the tracker resumes the run.
        last_step: the last step that the tracker holds; 0 for a new run, None if it cannot say.
        where: a command or a URL that shows the run.
    """

    run_id: str
    last_step: int | None
    where: str

    def log(self, step: int, scalars: Scalars, pictures: Pictures) -> None:
        """Stores a step that the tracker does not hold yet."""

    def finish(self, status: Status, summary: Mapping[str, Any]) -> None:
        """Stores the run's summary and closes."""


def flatten(values: Mapping[str, Any], prefix: str = "", separator: str = ".") -> dict[str, Any]:
    """Returns nested mappings as one mapping of joined keys."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{prefix}{separator}{key}" if prefix else str(key)
        flat |= flatten(value, name, separator) if isinstance(value, Mapping) else {name: value}
    return flat
