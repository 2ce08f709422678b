"""Reads the config of a fine-tuning job: the file or the recipe, the start, the overrides."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from mae_vit.config.command_line import Arguments
from mae_vit.config.load import load_config
from mae_vit.data.images.augment import Interpolation
from mae_vit.finetuning.config.from_start import WeightsOverrides
from mae_vit.finetuning.config.recipes import find_recipe
from mae_vit.finetuning.config.schema import FinetuneConfig
from mae_vit.models.geometry import ViTGeometry
from mae_vit.training.startup import as_array_task
from mae_vit.weights.foreign import ForeignWeights
from mae_vit.weights.start import Weights


class Starts(NamedTuple):
    """The weights that a run begins from: of ours, or of others. At most one is given."""

    weights: Weights | None
    foreign: ForeignWeights | None

    @property
    def digest(self) -> str | None:
        """Changes when the weights do; None without any."""
        given = self.weights or self.foreign
        return given.digest if given else None

    @property
    def interpolation(self) -> Interpolation:
        """What resizes images for measuring."""
        return self.foreign.images.interpolation if self.foreign else "bicubic"


def read_config(arguments: Arguments) -> tuple[FinetuneConfig, Starts, list[str]]:
    """Reads config and start, which has a say in the config; and notes on what of the file gives way.

    Raises:
        InputError: for whatever does not fit.
    """
    source, recipe = arguments.config, list[str]()
    if source is None:
        source, recipe = find_recipe(arguments.ckpt, arguments.overrides)
    overrides, notes = [*recipe, *arguments.overrides], list[str]()
    amendment = WeightsOverrides(arguments.ckpt, source, overrides)
    config = load_config(
        FinetuneConfig,
        source,
        overrides,
        amend=amendment,
        overrides_from=arguments.overrides_from,
        notes=notes,
    )
    notes += [
        f"the pretrained weights have {key}={start}, which replaces {said} of {Path(str(source)).name}"
        for key, (said, start) in amendment.replaced.items()
    ]
    geometry = amendment.start.geometry if amendment.start else None
    if isinstance(geometry, ViTGeometry) and geometry.img_size != config.model.image_hw:
        notes.append(
            f"model.img_size={config.model.img_size}: the start was pretrained at {list(geometry.img_size)}, its "
            "positions are interpolated"
        )
    return as_array_task(config), Starts(amendment.start, amendment.foreign), notes
