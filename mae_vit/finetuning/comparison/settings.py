"""The overrides of a comparison's fine-tuning runs."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from mae_vit.config.load import drop_alternatives
from mae_vit.config.typed_yaml import write_value
from mae_vit.finetuning.comparison.config import CompareConfig, EntrySection, Overrides
from mae_vit.finetuning.config.modes import MODES, ModeName
from mae_vit.finetuning.config.pretrained import WITH_START, read_values
from mae_vit.weights.names import is_frozen

# A third-party encoder brings these itself: the comparison's shared values are for ours.
_OF_THE_ENCODER = ("model.", "finetune.pool", "data.normalize")


def entry_settings(config: CompareConfig, entry: EntrySection) -> Overrides:
    """Joins a row's overrides: the comparison's and the entry's, which win."""
    shared = config.set
    if is_frozen(entry.start):
        shared = {key: value for key, value in shared.items() if not f"{key}.".startswith(_OF_THE_ENCODER)}
    return {**shared, **entry.set, "data.path": config.data.path}


def settings_with_start(
    path: Path, entry: EntrySection, mode: ModeName, overridden: Collection[str]
) -> Overrides:
    """Returns the values of a config that apply only with pretrained weights (`with_start`), by dotted key.

    The comparison's own keys, `overridden`, are left out. The result is empty if the config is gone: a report does
    not need it.
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

    def is_overridden(key: str) -> bool:  # the key itself, a key below it, or one above it
        return any(
            f"{key}.".startswith(f"{other}.") or f"{other}.".startswith(f"{key}.") for other in overridden
        )

    return {key: value for key, value in recipe.items() if not is_overridden(key)}


def override_words(overrides: Overrides) -> list[str]:
    """Formats overrides as words of a command line."""
    return [f"{key}={write_value(value)}" for key, value in overrides.items()]
