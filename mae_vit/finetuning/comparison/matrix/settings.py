"""The overrides of a comparison's fine-tuning runs."""

from __future__ import annotations

import json

from mae_vit.finetuning.comparison.config import CompareConfig, EntrySection, Mode, Overrides
from mae_vit.weights.start import is_frozen

# An encoder of others brings these. What the comparison sets for all rows is for ours.
_OF_THE_ENCODER = ("model.", "finetune.pool", "data.normalize")


def settings_of(config: CompareConfig, entry: EntrySection, mode: Mode, point: Overrides) -> Overrides:
    """Joins the overrides of a run: the comparison's, the entry's, the chosen ones; later ones win."""
    shared = config.set
    if is_frozen(entry.start):
        shared = {key: value for key, value in shared.items() if not f"{key}.".startswith(_OF_THE_ENCODER)}
    merged = {**shared, **entry.set, **point}
    if entry.compute_of is not None and "train.steps" in point:
        merged = {key: value for key, value in merged.items() if key not in ("train.epochs", "train.samples")}
    return {**merged, "data.path": config.data.path, "finetune.mode": mode}


def lines_of(overrides: Overrides) -> list[str]:
    """Writes overrides as on the command line. Values are JSON, which is valid YAML."""
    return [f"{key}={json.dumps(value)}" for key, value in overrides.items()]
