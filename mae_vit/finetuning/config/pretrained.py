"""Reads the config of fine-tuning: the file or recipe, what pretrained weights replace in it, the overrides."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mae_vit.config.command_line import Arguments
from mae_vit.config.encoders import ENCODERS, family_of
from mae_vit.config.load import ConfigSource, ConfigValues, drop_alternatives, load_config
from mae_vit.config.plugins import import_plugins, named_plugins
from mae_vit.config.typed_yaml import parse_yaml
from mae_vit.core.errors import InputError
from mae_vit.core.hub import is_hub_name
from mae_vit.core.user_files import read_text
from mae_vit.finetuning.config.modes import MODES
from mae_vit.finetuning.config.schema import FinetuneConfig
from mae_vit.models.geometry import Geometry, NetworkGeometry, ViTGeometry
from mae_vit.weights.names import name_of

if TYPE_CHECKING:  # slow to import: not for a run from scratch
    from mae_vit.weights.read import Weights

# Key of a config file; its sections override the others if there are pretrained weights.
WITH_START = "with_start"
# With one of these the command line says which network the weights are of.
_OF_THE_SHAPE = {"model.name", "model.embed_dim", "model.depth", "model.num_heads"}


def read_config(arguments: Arguments) -> tuple[FinetuneConfig, Weights | None, list[str]]:
    """Loads the config and the pretrained weights. Weights may override config values; each override yields a note.

    Raises:
        InputError: if config or weights do not fit.
    """
    source, recipe = arguments.config, list[str]()
    if source is None:
        # Reads the weights: slow to import.
        from mae_vit.finetuning.config.recipes import find_recipe

        source, recipe = find_recipe(arguments.ckpt, arguments.overrides)
    overrides, notes = [*recipe, *arguments.overrides], list[str]()
    if isinstance(source, Path) and source.is_fifo():  # a pipe can be read only once
        source = ConfigValues(read_text(source))
    # A plug-in may define the encoder of the weights.
    import_plugins(named_plugins(read_values(source), overrides))
    pretrained = WeightsOverrides(arguments.ckpt, source, overrides)
    config = load_config(
        FinetuneConfig,
        source,
        overrides,
        amend=pretrained,
        overrides_from=arguments.overrides_from,
        notes=notes,
    )
    notes += [
        f"the pretrained weights have {key}={value}, which replaces {stated} of {Path(str(source)).name}"
        for key, (stated, value) in pretrained.replaced.items()
    ]
    geometry = getattr(pretrained.weights, "geometry", None)
    if isinstance(geometry, ViTGeometry) and geometry.img_size != config.model.image_hw:
        notes.append(
            f"model.img_size={config.model.img_size}, but the weights were pretrained at "
            f"{list(geometry.img_size)}; positions are interpolated"
        )
    return config, pretrained.weights, notes


class WeightsOverrides:
    """Reads pretrained weights, and applies them to a config file's values; command-line overrides come later.

    The file's section `with_start` comes first, then the encoder's geometry and the normalization of its training.
    The file's image size wins, if it gives one. A network of timm's that ours cannot be brings its own size, and pools
    by itself.

    Attributes:
        weights: the pretrained weights; None for a run from scratch.
        replaced: key -> replaced value of the file, and value of the weights.
    """

    def __init__(self, ckpt: str | None, source: ConfigSource, overrides: Sequence[str] = ()) -> None:
        """Reads the weights that --ckpt names, or else the file, as a finished run's does.

        Raises:
            InputError: if the weights cannot be read, or are not given by --ckpt.
        """
        if ckpt is not None and not ckpt.strip():
            raise InputError(
                "--ckpt is empty; give a run folder, a weights file or timm:NAME, or leave it out for scratch"
            )
        given = [text.partition("=") for text in overrides]
        self._given = {key: value.strip("\"' ") for key, _, value in given}
        if value := self._given.get("finetune.start"):
            raise InputError(f'override "finetune.start={value}": give pretrained weights with --ckpt')
        stated = _section(read_values(source), "finetune")
        self._name = ckpt or stated.get("start")
        self._run = source.stem if isinstance(source, Path) else "finetune"
        self.weights: Weights | None = None
        self.replaced: dict[str, tuple[Any, Any]] = {}
        if self._name is not None:
            self._name = str(self._name)
            # The config's check refuses any other mode.
            if self._mode(stated) in MODES:
                from mae_vit.weights.read import read_weights

                self.weights = read_weights(self._name)

    def _mode(self, section: Mapping[str, Any]) -> str:
        return str(self._given.get("finetune.mode") or section.get("mode") or "finetune")

    def __call__(self, raw: dict[str, Any]) -> None:
        """Applies the weights to the sections as read.

        Raises:
            InputError: if `with_start` is not a mapping of sections, or the config names another network.
        """
        extra = raw.pop(WITH_START, None) or {}
        if not isinstance(extra, dict) or not all(isinstance(section, dict) for section in extra.values()):
            raise InputError(f"{WITH_START} must have sections with keys, such as train: {{epochs: 30}}")
        run = raw.setdefault("run", {})
        if isinstance(run, dict) and "name" not in run:
            parts = [self._run, self._given.get("finetune.mode"), self._name and run_name(self._name)]
            run["name"] = "-".join(filter(None, parts))
        if self.weights is None:
            return
        _lay_over(raw, extra)
        file = {section: {**_section(raw, section)} for section in ("model", "data")}
        facts = self._facts(raw, self.weights)
        for section, stated in file.items():
            for key, value in facts.get(section, {}).items():
                if stated.get(key, value) != value and f"{section}.{key}" not in self._given:
                    self.replaced[f"{section}.{key}"] = (stated[key], value)
        _lay_over(raw, facts)

    def _facts(self, raw: dict[str, Any], weights: Weights) -> dict[str, dict[str, Any]]:
        """Returns the values that the weights bring: geometry, normalization and pooling."""
        name, model, finetune = str(self._name), _section(raw, "model"), _section(raw, "finetune")
        # Pin the commit: a branch of the Hub moves.
        facts: dict[str, dict[str, Any]] = {
            "finetune": {"start": weights.source if is_hub_name(name) else name}
        }
        mode = MODES.get(self._mode(finetune))
        if (geometry := self._geometry(model, weights)) is not None:
            self._check_network(model, geometry)
            facts["model"] = self._network_facts(model, geometry, weights)
            if isinstance(geometry, NetworkGeometry):
                # Networks have their own pooling and head.
                finetune.pop("pool", None)
                if mode and mode.trains == "all":
                    finetune.pop("head_init", None)
        if weights.mean is not None and weights.std is not None:
            facts["data"] = {"normalize": [list(weights.mean), list(weights.std)]}
        if weights.network is None and "pool" not in finetune and not (mode and mode.labels == "mask"):
            facts["finetune"]["pool"] = weights.pool
        return facts

    def _network_facts(self, model: dict[str, Any], geometry: Geometry, weights: Weights) -> dict[str, Any]:
        """Returns the values of `model` that the weights bring; removes from it what their network does not have."""
        facts = geometry.to_config()
        if weights.geometry is None:
            del facts["in_chans"]  # which the data say, as for a config's own network
        if isinstance(geometry, ViTGeometry):
            # As in the official MAE code, learned positions begin from a fixed table.
            facts["pos_embed"] = "learnable"
        if weights.network is not None:
            del facts["patch_size"]  # which `simmim` alone has a use for
            for key in ("finetune.pool", "model.patch_size"):
                if key in self._given:
                    raise InputError(f"{key} has no effect on {weights.network.name}; leave it out")
        elif "img_size" in model:
            # Positions are interpolated to the size that the recipe asks for.
            del facts["img_size"]
        if family_of(model) != geometry.family:
            # Of the file's own options those stay that the weights' family shares.
            shared = {"img_size", "in_chans", "drop_path_rate"} & set(ENCODERS[geometry.family].model_fields)
            for key in set(model) - shared:
                del model[key]
        return facts

    def _geometry(self, model: Mapping[str, Any], weights: Weights) -> Geometry | None:
        """Returns the weights' geometry, or that of their shapes if it is not the config's; None for the config's."""
        if weights.geometry is not None or _OF_THE_SHAPE & self._given.keys() or family_of(model) != "vit":
            return weights.geometry
        from mae_vit.weights.encoder import info_from_weights

        with suppress(InputError, ValueError):  # shapes do not show the heads of all sizes
            found = info_from_weights(weights).geometry
            own = ENCODERS["vit"].model_validate({**model, "init": None}).geometry()
            shared = {name: getattr(own, name) for name in ("img_size", "in_chans", "pos_embed")}
            return None if replace(found, **shared) == own else found
        return None

    def _check_network(self, model: Mapping[str, Any], geometry: Geometry) -> None:
        """Rejects an override for another network than the weights', or a recipe for another kind."""
        given, ours = self._given.get("model.name"), geometry.to_config()["name"]
        stated = given or model.get("name")
        if stated not in (None, ours) and (given or family_of({"name": stated}) == "network"):
            raise InputError(
                f'model.name="{stated}" does not fit --ckpt {self._name} ({geometry.describe()}); give a config '
                f"for {ours}, or model.name={ours}"
            )


def run_name(weights: str) -> str:
    """Turns the name of weights into a part of a run's name."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", name_of(weights)) or "weights"


def read_values(source: ConfigSource) -> dict[str, Any]:
    """Returns the values of a config by section; empty if it is missing or invalid."""
    try:
        text = source.text if isinstance(source, ConfigValues) else read_text(source)
        content = parse_yaml(text, str(source))
    except (OSError, InputError):
        return {}
    return content if isinstance(content, dict) else {}


def _section(raw: Mapping[str, Any], name: str) -> dict[str, Any]:
    section = raw.get(name)
    return section if isinstance(section, dict) else {}


def _lay_over(raw: dict[str, Any], extra: Mapping[str, Mapping[str, Any]]) -> None:
    drop_alternatives(raw, {f"{section}.{key}" for section, values in extra.items() for key in values})
    for section, values in extra.items():
        raw[section] = {**_section(raw, section), **values}
