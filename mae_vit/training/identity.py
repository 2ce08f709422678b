"""What must stay equal when a run resumes: its identity, in checkpoints and run folders."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from mae_vit.config.plugins import plugin_digests
from mae_vit.config.schema import Config
from mae_vit.core.errors import InputError
from mae_vit.core.urls import redact_url
from mae_vit.training.checkpoints.checkpoint import HISTORY

# These sections and options may change when a run resumes. A change to any other that a checkpoint has is an error that
# names it.
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
    # The pixels are the same.
    "data.augment.device",
    "data.damage_budget",
    "train.batch_size_per_device",
    "train.zero_stage",
    "train.engine",
    "train.compile",
    "train.attention",
    # It recomputes the same numbers.
    "train.activation_checkpointing",
)
PRECISION = "train.precision"
_PLUGINS = "run.plugins"
# Fingerprints of splits, and what a run has them for.
IMAGES = {"data.fingerprint": "training", "finetune.test_fingerprint": "test"}
# They follow from the training images.
OF_THE_IMAGES = ("data.mean", "data.std")
# Values that have no key of their own, and what a user changes to change them.
_NAMES = {
    "finetune.evaluate_every_steps": "monitor.evaluate_every_steps",
    "finetune.start_digest": "--ckpt (the digest of its weights)",
    "finetune.test_split": "data.path (its split for testing)",
}
LENGTH_KEYS = ("train.steps", "train.epochs", "train.samples")


@dataclass(frozen=True)
class Identity:
    """The options and derived values that must not change when a run resumes.

    Attributes:
        values: options and derived values by dotted key, as plain data.
        ignored: keys that may differ because the config allows it.
        data_path: where the images are, for messages.
    """

    values: dict[str, Any]
    ignored: frozenset[str] = frozenset()
    data_path: str = ""

    def with_history(self, **facts: Any) -> Identity:
        """Adds the history of the weights (keys of `HISTORY`), which is not compared.

        The run reads it when it resumes, and so do runs that start from this run's weights.
        """
        return replace(self, values={**self.values, **facts})

    def differing_keys(self, saved: Mapping[str, Any], *, extend: bool = False) -> list[str]:
        """Returns the keys that differ from a saved identity; `extend` allows another length.

        Keys that it lacks do not: otherwise a new option would prevent old runs from resuming.
        """
        now = self.values
        return [
            key
            for key in saved
            if key not in (*HISTORY, *self.ignored)
            and saved[key] != now.get(key)
            and not (extend and key in LENGTH_KEYS)
            # A resumed run keeps the precision that "auto" chose at its start.
            and not (key == PRECISION and now.get(key) == "auto")
        ]

    def describe_differences(self, saved: Mapping[str, Any], *, extend: bool = False) -> str:
        """Names up to four differences from a saved identity, with both values, and counts the rest; empty without.

        Other images are named by their path, unless another option chose them: fingerprints tell a reader nothing.
        """
        differing = self.differing_keys(saved, extend=extend)
        other = [what for key, what in IMAGES.items() if key in differing]
        chosen = any(
            key.startswith(("data.", "finetune.test")) and key not in (*IMAGES, *OF_THE_IMAGES)
            for key in differing
        )
        words = list[str]()
        if other and not chosen:
            words = [f"data.path: {self.data_path} has other {' and '.join(other)} images than before"]
        follow = [*IMAGES, *(OF_THE_IMAGES if "training" in other else ())]
        words += [self._describe(saved, key) for key in differing if key not in follow]
        return "; ".join([*words[:4], *([f"and {more} more"] if (more := len(words) - 4) > 0 else [])])

    def _describe(self, saved: Mapping[str, Any], key: str) -> str:
        was, now = saved.get(key), self.values.get(key)
        if key == _PLUGINS:  # digests by name
            old, new = was or {}, now or {}
            names = [name for name in {**old, **new} if old.get(name) != new.get(name)]
            return f"{key}: {', '.join(names)} changed; run.plugins_may_change=true allows it"
        shown = ("unset" if value is None else repr(value) for value in (was, now))
        return "{} was {}, now {}".format(_NAMES.get(key, key), *shown)


def flatten(values: Mapping[str, Any], prefix: str = "", separator: str = ".") -> dict[str, Any]:
    """Flattens nested mappings into one with joined keys."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{prefix}{separator}{key}" if prefix else str(key)
        flat |= flatten(value, name, separator) if isinstance(value, Mapping) else {name: value}
    return flat


def run_identity(config: Config, *, derived: Mapping[str, Any]) -> Identity:
    """Flattens a resolved config, without the options that may change.

    `derived` holds values that follow from the data, such as its fingerprint and normalization.
    """
    values = {
        key: value
        for key, value in flatten(config.model_dump(mode="json")).items()
        if key.partition(".")[0] not in _FREE_SECTIONS and key not in FREE_KEYS
    }
    values[_PLUGINS] = plugin_digests(config.run.plugins)
    ignored = frozenset({_PLUGINS} if config.run.plugins_may_change else ())
    return Identity({**values, **derived}, ignored, redact_url(config.data.path))


def check_identity(
    saved: Mapping[str, Any], identity: Identity, place: str, *, otherwise: str, extend: bool = False
) -> None:
    """Raises InputError, with up to four keys, if the identity differs from that in a checkpoint or run folder.

    `otherwise` is what the user may do instead of undoing changes (`RunFolder.otherwise`).
    """
    if differing := identity.differing_keys(saved, extend=extend):
        longer = ", --extend allows another length" if set(differing) <= set(LENGTH_KEYS) else ""
        raise InputError(
            f"{place} has other settings: {identity.describe_differences(saved, extend=extend)}. Undo these "
            f"changes{longer}, or {otherwise}"
        )
