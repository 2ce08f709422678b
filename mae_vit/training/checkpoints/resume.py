"""Finds the checkpoint that a run resumes from, and checks that the run's options match it.

Precedence: the run's own checkpoints, then an explicit checkpoint, then scratch.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mae_vit.config.command_line import ResumeMode
from mae_vit.config.plugins import plugin_digests
from mae_vit.config.schema import Config
from mae_vit.core.errors import InputError
from mae_vit.training.checkpoints.checkpoint import (
    HISTORY,
    STATE,
    BrokenCheckpoint,
    CheckpointInfo,
    list_checkpoints,
    newest_checkpoint,
    verify_checkpoint,
)
from mae_vit.training.outputs.run_folder import RunFolder

# These sections and options may change when a run resumes. A change to any other is an error that names it.
_FREE_SECTIONS = ("monitor", "checkpoint", "guard")
FREE_KEYS = (
    "run.name",
    "run.dir",
    "run.device",
    "run.hang_timeout_s",
    "run.plugins_may_change",
    # The data may move: its fingerprint is compared instead.
    "data.path",
    "data.cache_dir",
    "data.cache_gib",
    # Pretrained weights may move: their digest is compared instead.
    "finetune.start",
    "data.workers",
    "data.source",
    "data.memory_limit_gib",
    "data.damage_budget",
    "train.batch_size_per_device",
    "train.zero_stage",
    "train.engine",
    "train.compile",
    # It recomputes the same numbers.
    "train.activation_checkpointing",
)
PRECISION = "train.precision"
_PLUGINS = "run.plugins"
_LENGTH_KEYS = ("train.steps", "train.epochs", "train.samples")


@dataclass(frozen=True)
class Identity:
    """The options and derived values that must not change when a run resumes.

    Attributes:
        values: options and derived values by dotted key, as plain data.
        new: keys that an older checkpoint may lack: options at their defaults, and derived values.
            Without them a new option would prevent old runs from resuming.
        ignored: keys that may differ because the config allows it.
    """

    values: dict[str, Any]
    new: frozenset[str]
    ignored: frozenset[str] = frozenset()

    def with_history(self, **facts: Any) -> Identity:
        """Adds the history of the weights (keys of `HISTORY`), which `check_identity` does not compare.

        The run reads it when it resumes, and so do runs that start from this run's weights.
        """
        return replace(self, values={**self.values, **facts})


def run_identity(config: Config, *, derived: Mapping[str, Any]) -> Identity:
    """Flattens a resolved config, without the options that may change.

    `derived` holds values that follow from the data, such as its fingerprint and normalization.
    """
    dumped = config.model_dump(mode="json")
    values = {
        key: value
        for section, options in dumped.items()
        if section not in _FREE_SECTIONS
        for key, value in _flatten(section, options)
        if key not in FREE_KEYS
    }
    values[_PLUGINS] = plugin_digests(config.run.plugins)
    new = {key for key in values if _at_default(config, dumped, key)}
    ignored = frozenset({_PLUGINS} if config.run.plugins_may_change else ())
    return Identity({**values, **derived}, frozenset({*new, *derived}), ignored)


def _at_default(config: Config, dumped: dict[str, Any], key: str) -> bool:
    """Returns whether the config stays the same without this key.

    It validates the config again, because some defaults depend on other options (betas on the optimizer).
    """
    without = copy.deepcopy(dumped)
    *path, name = key.split(".")
    section = without
    for part in path:
        section = section[part]
    del section[name]
    try:
        return type(config).model_validate(without) == config
    except ValueError:
        return False  # the key is required, alone or as one of a group


def _flatten(prefix: str, value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, dict):
        return [item for key, inner in value.items() for item in _flatten(f"{prefix}.{key}", inner)]
    return [(prefix, value)]


def check_identity(
    saved: Mapping[str, Any], identity: Identity, place: Path, *, extend: bool = False
) -> None:
    """Checks that a resumed run has the identity of the saved one.

    Args:
        saved: values of the saved identity.
        identity: identity of the run that resumes.
        place: checkpoint or run folder that the message names.
        extend: the run's length may change.

    Raises:
        InputError: if values differ; names up to four keys with both values.
    """
    if differing := _differing_keys(saved, identity, extend=extend):
        longer = ", --extend allows another length" if set(differing) <= set(_LENGTH_KEYS) else ""
        raise InputError(
            f"{place} belongs to another run: {describe_differences(saved, identity, extend=extend)}. "
            f"Take those back{longer}, or give this run another run.name, or begin again with `--resume never`, "
            "which moves the old run aside"
        )


def describe_differences(saved: Mapping[str, Any], identity: Identity, *, extend: bool = False) -> str:
    """Names up to four keys that differ from a saved identity, with both values; empty if none does."""

    def shown(values: Mapping[str, Any], key: str) -> str:
        return "unset" if values.get(key) is None else repr(values[key])

    def difference(key: str) -> str:
        if key == _PLUGINS:  # digests by name
            was, now = saved.get(key) or {}, identity.values[key]
            names = [name for name in {**was, **now} if was.get(name) != now.get(name)]
            return f"{key}: {', '.join(names)} changed, which run.plugins_may_change=true allows"
        return f"{key} was {shown(saved, key)}, now {shown(identity.values, key)}"

    return "; ".join(map(difference, _differing_keys(saved, identity, extend=extend)[:4]))


def _differing_keys(saved: Mapping[str, Any], identity: Identity, *, extend: bool) -> list[str]:
    now = identity.values
    return [
        key
        for key in {**saved, **now}
        if key not in (*HISTORY, *identity.ignored)
        and saved.get(key) != now.get(key)
        and (key in saved or key not in identity.new)
        and not (extend and key in _LENGTH_KEYS)
        # A resumed run keeps the precision that "auto" chose at its start.
        and not (key == PRECISION and now.get(key) == "auto")
    ]


def find_checkpoint(
    folder: RunFolder,
    resume: ResumeMode,
    identity: Identity,
    *,
    extend: bool = False,
    warn: bool = True,
) -> CheckpointInfo | None:
    """Returns the checkpoint that the run resumes from; None for a fresh start.

    Raises:
        InputError: if an explicit path holds no intact checkpoint, the checkpoint belongs to
            another run, or all checkpoints of this run are broken.
    """
    if resume == "never":
        return None
    checkpoint = newest_checkpoint(folder.checkpoints, warn=warn)
    # The run's own checkpoint of step 0 holds no training, so an explicit checkpoint takes precedence.
    untrained = checkpoint is None or checkpoint.step == 0
    if untrained and isinstance(resume, Path):
        checkpoint, untrained = find_explicit(resume, warn=warn), False
    if checkpoint is None:
        return None
    if untrained and _differing_keys(checkpoint.identity, identity, extend=extend):
        return None  # start again with the new config
    check_identity(checkpoint.identity, identity, checkpoint.path, extend=extend)
    return checkpoint


def find_explicit(path: Path, *, warn: bool = True) -> CheckpointInfo:
    """Returns the checkpoint at `path`, or the newest intact one if `path` is a run folder.

    Raises:
        InputError: if there is no intact checkpoint.
    """
    if (path / STATE).exists():
        try:
            return verify_checkpoint(path)
        except BrokenCheckpoint as error:
            raise InputError(f"--resume {error}") from None
    for folder in (path / "checkpoints", path):
        if list_checkpoints(folder):
            newest = newest_checkpoint(folder, warn=warn)
            assert newest is not None
            return newest
    what = "is no folder" if not path.is_dir() else "holds no checkpoint (step-NNNNNNNN with state.json)"
    raise InputError(f"--resume {path}: {what}")


def set_aside(folder: RunFolder) -> Path | None:
    """Moves an existing run folder to NAME.1, NAME.2, ...; returns the new path, or None if there is no folder."""
    if not folder.path.exists():
        return None
    number = 1
    while (moved := folder.path.with_name(f"{folder.path.name}.{number}")).exists():
        number += 1
    folder.path.rename(moved)
    return moved
