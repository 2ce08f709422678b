"""Where a run starts (its own checkpoints > an explicit one > scratch), and which options must not change."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mae_vit.config.command_line import ResumeMode
from mae_vit.config.schema import Config
from mae_vit.core.errors import InputError
from mae_vit.training.checkpoints.checkpoint import CheckpointInfo, newest_checkpoint, verify_checkpoint
from mae_vit.training.checkpoints.format import LABELS_SEEN, STATE, BrokenCheckpoint, list_checkpoints
from mae_vit.training.outputs.run_folder import RunFolder

# Options that may change when a run resumes; a change of any other is an error that names it.
_FREE_SECTIONS = ("monitor", "checkpoint", "guard")
_FREE_KEYS = (
    "run.name",
    "run.dir",
    "run.hang_timeout_s",
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
    "train.compress_gradients",
    # These recompute the same numbers.
    "train.activation_checkpointing",
)
_LENGTH_KEYS = ("train.steps", "train.epochs", "train.samples")


@dataclass(frozen=True)
class Identity:
    """The options and derived values that must not change when a run resumes.

    Attributes:
        values: by dotted key, as plain data.
        new: keys that an older checkpoint may lack: options at their
            defaults, and derived values. Without this, a new option would break old runs.
    """

    values: dict[str, Any]
    new: frozenset[str]

    def with_seen_labels(self, labels: dict[str, Any] | None) -> Identity:
        """Adds which labels its weights have seen, by way of its start too: told on, and compared with nothing."""
        return replace(self, values={**self.values, LABELS_SEEN: labels})


def run_identity(config: Config, *, derived: Mapping[str, Any]) -> Identity:
    """Flattens a resolved config, without options that may change.

    Args:
        config: of the run.
        derived: values that follow from the data, such as its fingerprint and normalization.
    """

    def flat(sections: dict[str, Any]) -> dict[str, Any]:
        return {
            key: value
            for section, values in sections.items()
            if section not in _FREE_SECTIONS
            for key, value in _flatten(section, values)
            if key not in _FREE_KEYS
        }

    dumped = config.model_dump(mode="json")
    values = flat(dumped)
    new = {key for key in values if _at_default(config, dumped, key)}
    return Identity({**values, **derived}, frozenset({*new, *derived}))


def _at_default(config: Config, dumped: dict[str, Any], key: str) -> bool:
    """Whether a config without this key is the same config.

    Validates the schema for this: some defaults depend on other options (betas on the optimizer).
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
        return False  # a required key, or one of several alternatives


def _flatten(prefix: str, value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, dict):
        return [item for key, inner in value.items() for item in _flatten(f"{prefix}.{key}", inner)]
    return [(prefix, value)]


def check_identity(
    saved: Mapping[str, Any], identity: Identity, place: Path, *, extend: bool = False
) -> None:
    """Checks that a resumed run has the identity of the saved one.

    Args:
        saved: the saved identity's values.
        identity: of the resumed run.
        place: of the saved identity: a checkpoint or a run folder.
        extend: the run's length may change.

    Raises:
        InputError: with each key that differs and both values.
    """
    now = identity.values
    differing = [
        key
        for key in {**saved, **now}
        if key != LABELS_SEEN
        and saved.get(key) != now.get(key)
        and (key in saved or key not in identity.new)
        and not (extend and key in _LENGTH_KEYS)
    ]
    if differing:
        shown = [f"{key} was {saved.get(key)!r}, now {now.get(key)!r}" for key in differing[:4]]
        longer = ", --extend allows another length" if set(differing) <= set(_LENGTH_KEYS) else ""
        raise InputError(
            f"{place} belongs to another run: {'; '.join(shown)}. "
            f"Take those back{longer}, or give this run another run.name"
        )


def find_checkpoint(
    folder: RunFolder,
    resume: ResumeMode,
    identity: Identity,
    *,
    extend: bool = False,
    warn: bool = True,
) -> CheckpointInfo | None:
    """Returns the checkpoint that the run resumes from; None for a fresh start.

    Args:
        folder: of the run.
        resume: what the user asked for.
        identity: from `run_identity`.
        extend: the run's length may change.
        warn: print which broken checkpoints are skipped.

    Raises:
        InputError: if an explicit path holds no intact checkpoint, if the checkpoint belongs
            to another run, or if all of the run's own are broken.
    """
    if resume == "never":
        return None
    of_this_run = newest_checkpoint(folder.checkpoints, warn=warn)
    checkpoint = of_this_run or (find_explicit(resume, warn=warn) if isinstance(resume, Path) else None)
    if checkpoint is None:
        return None
    try:
        check_identity(checkpoint.identity, identity, checkpoint.path, extend=extend)
    except InputError:
        # At step 0 another config cannot spoil anything.
        if of_this_run is None or of_this_run.step:
            raise
        return None
    return checkpoint


def find_explicit(path: Path, *, warn: bool = True) -> CheckpointInfo:
    """Verifies a checkpoint folder, or the newest one of a run folder.

    Raises:
        InputError: if there is none.
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
    """Moves an existing run folder to NAME.1, NAME.2, ...; returns the new path, None without a folder."""
    if not folder.path.exists():
        return None
    number = 1
    while (moved := folder.path.with_name(f"{folder.path.name}.{number}")).exists():
        number += 1
    folder.path.rename(moved)
    return moved
