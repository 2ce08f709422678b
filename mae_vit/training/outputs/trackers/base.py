"""The interface of everything that a run is logged to: TensorBoard, experiment trackers, those of plug-ins."""

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
ROLLED_BACK = "guard/went_back_to_step"
# The group of a value that is no metric of the objective.
_GROUPS = {
    **dict.fromkeys(("lr", "grad_norm", "loss_scale", "skipped_steps"), "optimizer"),
    **dict.fromkeys(("images_per_s", "data_wait_frac", "mfu", "peak_memory_gib", "save_stall_s"), "speed"),
}
_NESTED = ("heldout", "probe")
# They say where a line stands.
_NOT_SHOWN = ("step", "epoch", "samples", "wall_s")


class Tracker(Protocol):
    """Receives what a run logs, on rank 0. Its methods may raise: the run then continues without it.

    Attributes:
        title: its name in messages.
        where: the command or the URL that shows the run.
        run_id: the tracked run's id in the tracker's store, in which a resumed run continues; empty without a store.
    """

    title: str
    where: str
    run_id: str

    def log(self, step: int, scalars: Scalars, pictures: Pictures) -> None:
        """Stores the metrics and the pictures of a step. After a rollback or a resume, a step may come again."""

    def go_back(self, step: int) -> None:
        """Notes that the run rolled back to the checkpoint of `step`."""

    def finish(self, status: Status, summary: Mapping[str, Any]) -> None:
        """Stores the run's summary and closes."""


@dataclass(frozen=True)
class TrackedRun:
    """Describes a run to an experiment tracker.

    Attributes:
        name: shown by the tracker.
        group: group of a comparison's runs; None without one.
        folder: the run folder.
        config: values by dotted key, without credentials.
        run_id: id of the tracked run to continue; None begins a new one.
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


def shown_scalars(line: Mapping[str, Any]) -> dict[str, float]:
    """Returns the numbers of a line of `metrics.jsonl` by their shown name: `train/loss`, `heldout/loss`."""
    values = {
        f"{_GROUPS.get(name, 'train')}/{name}": value
        for name, value in line.items()
        if name not in (*_NOT_SHOWN, *_NESTED)
    }
    for group in _NESTED:
        values |= {f"{group}/{name}": value for name, value in line.get(group, {}).items()}
    return {name: value for name, value in values.items() if isinstance(value, int | float)}
