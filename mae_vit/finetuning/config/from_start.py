"""Overrides that follow from the pretrained weights: geometry, normalization, and the `with_start` section."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mae_vit.config.encoders import ENCODERS, family_of
from mae_vit.config.load import ConfigSource
from mae_vit.config.overrides import drop_alternatives
from mae_vit.core.errors import InputError
from mae_vit.core.hub import is_hub_name
from mae_vit.finetuning.config.schema import SEGMENTATION, TRAINS_ENCODER
from mae_vit.models.geometry import Geometry, ViTGeometry
from mae_vit.weights.foreign import ForeignWeights, read_foreign
from mae_vit.weights.names import FOREIGN_ORIGIN, is_frozen
from mae_vit.weights.read import read_weights
from mae_vit.weights.start import Weights, name_of

# Sections of a config file that override the others with pretrained weights.
WITH_START = "with_start"


class WeightsOverrides:
    """Applies the facts of pretrained weights to a config file's values; overrides come after it.

    First the file's section `with_start`, then the encoder's geometry and the
    normalization that the start was trained with; `replaced` tells what else the file
    said, (its value, the start's) by key. The size of images is the file's, where it
    gives one. An encoder of others has its own network and size instead.
    """

    def __init__(self, ckpt: str | None, source: ConfigSource, overrides: Sequence[str] = ()) -> None:
        """Remembers --ckpt, and what names the run: the config's file, and a mode among the overrides.

        Raises:
            InputError: if the start is given in a way that does not count.
        """
        if ckpt is not None and not ckpt.strip():
            raise InputError('--ckpt "" names no start: give one, or leave --ckpt out to begin from scratch')
        for text in overrides:
            if text.partition("=")[0] == "finetune.start":
                raise InputError(f'override "{text}": weights to begin from are given by --ckpt')
        modes = [
            text.partition("=")[2].strip("\"' ") for text in overrides if text.startswith("finetune.mode=")
        ]
        stem = source.stem if isinstance(source, Path) else "finetune"
        self._ckpt, self._name = ckpt, "-".join([stem, *modes[-1:]])
        self._mode = modes[-1] if modes else None
        self._network = next(
            (text.partition("=")[2].strip("\"' ") for text in overrides if text.startswith("model.name=")),
            None,
        )
        # What an override says is said by nothing else.
        self._overridden = {text.partition("=")[0] for text in overrides}
        self.start: Weights | None = None
        self.foreign: ForeignWeights | None = None
        self.replaced: dict[str, tuple[Any, Any]] = {}

    def __call__(self, raw: dict[str, Any]) -> None:
        """Changes sections as read.

        Raises:
            InputError: if the start cannot be read.
        """
        extra = _sections(raw.pop(WITH_START, None) or {})
        section = raw.get("finetune")
        named = self._ckpt or (section.get("start") if isinstance(section, dict) else None)
        run = raw.setdefault("run", {})
        if isinstance(run, dict):
            run.setdefault("name", self._name + (f"-{start_name(str(named))}" if named else ""))
        if named is None:
            return
        if is_frozen(str(named)):
            self._begin_from_foreign(raw, str(named))
            return
        self.start = read_weights(str(named))
        _lay_over(raw, extra)
        # Of a branch of the Hub, which moves, the commit.
        pinned = self.start.source if is_hub_name(str(named)) else str(named)
        facts: dict[str, Any] = {"finetune": {"start": pinned}}
        model = raw.get("model")
        if (geometry := self.start.geometry) is not None:
            self._check_network(model, geometry, str(named))
            facts["model"] = geometry.to_config()
            if isinstance(geometry, ViTGeometry):
                # As in the official MAE code: a fixed table is where learned positions begin.
                facts["model"]["pos_embed"] = "learnable"
            if isinstance(model, dict) and "img_size" in model:
                # Positions are interpolated to the size that the recipe asks for.
                del facts["model"]["img_size"]
            if isinstance(model, dict) and family_of(model) != geometry.family:
                _keep_shared(model, geometry.family)
        if self.start.mean is not None and self.start.std is not None:
            facts["data"] = {"normalize": [list(self.start.mean), list(self.start.std)]}
        section = raw.get("finetune")
        stated = section.get("mode") if isinstance(section, dict) else None
        if (self._mode or stated) not in SEGMENTATION and not (
            isinstance(section, dict) and "pool" in section
        ):
            facts["finetune"]["pool"] = self.start.pool
        self.replaced = self._replaced(raw, facts)
        _lay_over(raw, facts)

    def _check_network(self, model: Any, geometry: Geometry, start: str) -> None:
        """Refuses a recipe, or an override, for another network than that of the weights."""
        stated = self._network or (model.get("name") if isinstance(model, dict) else None)
        ours = geometry.to_config()["name"]
        if stated not in (None, ours) and family_of({"name": stated}) == "network":
            raise InputError(
                f'model.name="{stated}" does not fit --ckpt {start}, which is {geometry.describe()}: give a config for '
                f"{ours}, or model.name={ours}"
            )

    def _begin_from_foreign(self, raw: dict[str, Any], start: str) -> None:
        """Takes network, size and normalization of an encoder of others; the file's `model` gives way whole."""
        section = raw.setdefault("finetune", {})
        own_mode = section.get("mode") if isinstance(section, dict) else None
        # Before anything is fetched.
        check_frozen_mode(start, str(self._mode or own_mode or "finetune"))
        self.foreign = read_foreign(start)
        if self._network not in (None, self.foreign.name):
            raise InputError(
                f'override "model.name={self._network}": {start} brings its own network, {self.foreign.name}'
            )
        images = self.foreign.images
        facts: dict[str, Any] = {
            "finetune": {"start": start},
            "model": {
                "name": self.foreign.name,
                "img_size": list(images.img_size),
                "in_chans": images.in_chans,
            },
            "data": {"normalize": [list(images.mean), list(images.std)]},
        }
        self.replaced = self._replaced(raw, facts)
        raw["model"] = {}
        if isinstance(section, dict):
            section.pop("pool", None)
        _lay_over(raw, facts)

    def _replaced(self, raw: Mapping[str, Any], facts: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
        """Returns what a file says otherwise than its start: its value and the start's, by key."""
        return {
            f"{section}.{key}": (raw[section][key], value)
            for section in ("model", "data")
            for key, value in facts.get(section, {}).items()
            if isinstance(raw.get(section), dict)
            and raw[section].get(key, value) != value
            and f"{section}.{key}" not in self._overridden
        }


def _keep_shared(model: dict[str, Any], family: str) -> None:
    """Leaves of a file's encoder what does not define it and an encoder of another family has, too."""
    shared = {"img_size", "in_chans", "drop_path_rate", "patch_init"} & set(ENCODERS[family].model_fields)
    for key in set(model) - shared:
        del model[key]


def _sections(extra: Any) -> dict[str, dict[str, Any]]:
    if not isinstance(extra, dict):
        raise InputError(f"{WITH_START}: a mapping of sections, not {type(extra).__name__}")
    for name, section in extra.items():
        if not isinstance(section, dict):
            raise InputError(f"{WITH_START}.{name}: this is a section: give its keys")
    return extra


def check_frozen_mode(start: str, mode: str) -> None:
    """Checks that an encoder of others is only measured.

    Raises:
        InputError: if the mode trains it.
    """
    if mode in TRAINS_ENCODER:
        raise InputError(
            f"{start} is {FOREIGN_ORIGIN}, and never trained here: give finetune.mode=knn, few_shot, linear_probe or "
            f'segment_probe (in a comparison "modes" of this entry), not "{mode}"'
        )


def start_name(start: str) -> str:
    """A start's name as part of a run's name."""
    return (
        "".join(letter if letter.isalnum() or letter in "._-" else "-" for letter in name_of(start))
        or "start"
    )


def _lay_over(raw: dict[str, Any], extra: Mapping[str, Any]) -> None:
    keys = {f"{section}.{key}" for section, values in extra.items() if values for key in values}
    drop_alternatives(raw, keys)
    for section, values in extra.items():
        below = raw.setdefault(section, {})
        if isinstance(below, dict) and isinstance(values, dict):
            below.update(values)
        else:
            raw[section] = values
