"""Under which name each value of a line of metrics is shown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Values that are not metrics of the objective.
_GROUPS = {
    "lr": "optimizer",
    "grad_norm": "optimizer",
    "loss_scale": "optimizer",
    "skipped_steps": "optimizer",
    "images_per_s": "speed",
    "data_wait_frac": "speed",
    "mfu": "speed",
    "peak_memory_gib": "speed",
    "save_stall_s": "speed",
}
_NESTED = ("heldout", "probe")
# They say where a line stands.
_NOT_SHOWN = ("step", "epoch", "samples", "wall_s")
ROLLED_BACK = "guard/went_back_to_step"
# Every line of metrics has it, as a number.
IN_EVERY_LINE = "optimizer/lr"


def scalars_of(line: Mapping[str, Any]) -> dict[str, float]:
    """Returns the numbers of a line of `metrics.jsonl` by their shown name: `train/loss`, `heldout/loss`."""
    values = {
        f"{_GROUPS.get(name, 'train')}/{name}": value
        for name, value in line.items()
        if name not in (*_NOT_SHOWN, *_NESTED)
    }
    for group in _NESTED:
        values |= {f"{group}/{name}": value for name, value in line.get(group, {}).items()}
    return {name: value for name, value in values.items() if isinstance(value, int | float)}
