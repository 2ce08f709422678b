"""The interface of trackers: TensorBoard, experiment trackers, plug-ins."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from mae_vit.training.outputs.run_folder import Status

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
        """Records that the run rolled back to the checkpoint of `step`."""

    def finish(self, status: Status, summary: Mapping[str, Any]) -> None:
        """Stores the run's summary and closes."""


@dataclass(frozen=True)
class TrackedRun:
    """Describes a run to an experiment tracker.

    Attributes:
        name: the run's name in the tracker.
        group: name of the comparison that the run belongs to, or None.
        folder: the run folder.
        config: values by dotted key, without credentials.
        run_id: id of the tracked run to continue; None creates a new one.
    """

    name: str
    group: str | None
    folder: Path
    config: Mapping[str, Any]
    run_id: str | None = None


def flatten(values: Mapping[str, Any], prefix: str = "", separator: str = ".") -> dict[str, Any]:
    """Flattens nested mappings into one with joined keys."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{prefix}{separator}{key}" if prefix else str(key)
        flat |= flatten(value, name, separator) if isinstance(value, Mapping) else {name: value}
    return flat


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
