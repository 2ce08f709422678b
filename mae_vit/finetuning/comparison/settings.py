"""The overrides of a comparison's fine-tuning runs."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from mae_vit.config.overrides import drop_alternatives
from mae_vit.config.typed_yaml import write_value
from mae_vit.finetuning.comparison.config import CompareConfig, EntrySection, Overrides
from mae_vit.finetuning.config.modes import MODES, ModeName
from mae_vit.finetuning.config.pretrained import WITH_START, read_values
from mae_vit.weights.names import is_frozen

# A third-party encoder brings these. What the comparison sets for all rows is for ours.
_OF_THE_ENCODER = ("model.", "finetune.pool", "data.normalize")


def entry_settings(config: CompareConfig, entry: EntrySection) -> Overrides:
    """Joins the overrides of a row's runs: the comparison's and the entry's, which win."""
    shared = config.set
    if is_frozen(entry.start):
        shared = {key: value for key, value in shared.items() if not f"{key}.".startswith(_OF_THE_ENCODER)}
    return {**shared, **entry.set, "data.path": config.data.path}


def settings_with_start(
    path: Path, entry: EntrySection, mode: ModeName, overridden: Collection[str]
) -> Overrides:
    """Returns what a config says with pretrained weights alone (`with_start`), by dotted keys.

    Reports are written without the config, too. Then it is not known, and the result is empty.

    Args:
        path: file of the config.
        entry: row of that config.
        mode: mode in which the entry is measured.
        overridden: keys that the comparison sets, which win.
    """
    if entry.start is None or is_frozen(entry.start) or MODES[mode].trains == "nothing":
        return {}
    sections = read_values(path).get(WITH_START)
    if not isinstance(sections, dict):
        return {}
    drop_alternatives(sections, overridden)
    recipe = {
        f"{name}.{key}": value
        for name, section in sections.items()
        if isinstance(section, dict)
        for key, value in section.items()
    }
    if MODES[mode].trains != "all":
        recipe.pop("optim.layer_decay", None)

    def is_overridden(key: str) -> bool:  # itself, a part of it, or the whole that it is part of
        return any(
            f"{key}.".startswith(f"{other}.") or f"{other}.".startswith(f"{key}.") for other in overridden
        )

    return {key: value for key, value in recipe.items() if not is_overridden(key)}


def override_words(overrides: Overrides) -> list[str]:
    """Writes overrides as on the command line."""
    return [f"{key}={write_value(value)}" for key, value in overrides.items()]
