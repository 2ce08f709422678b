"""Reads the config of a fine-tuning job: the file or the recipe, the pretrained weights, the overrides."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mae_vit.config.command_line import Arguments
from mae_vit.config.load import ConfigValues, load_config
from mae_vit.config.plugins import import_plugins, named_plugins
from mae_vit.core.user_files import read_text
from mae_vit.finetuning.config.pretrained import WeightsOverrides, read_values
from mae_vit.finetuning.config.schema import FinetuneConfig
from mae_vit.models.geometry import ViTGeometry

if TYPE_CHECKING:
    from mae_vit.finetuning.config.pretrained import Pretrained


def read_config(arguments: Arguments) -> tuple[FinetuneConfig, Pretrained | None, list[str]]:
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
            f"model.img_size={config.model.img_size}: the weights were pretrained at {list(geometry.img_size)}, "
            "positions are interpolated"
        )
    return config, pretrained.weights, notes
