"""Pretraining objectives: one file each, one line in the dictionary.

To add one, write `mae_vit/objectives/NAME.py` with an `ObjectiveSection` (its
`name` a Literal) and an `Objective`, and list the section here; config, command
line and contract tests follow the dictionary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Union

from pydantic import Field

from mae_vit.objectives.base import Objective, ObjectiveOutput, ObjectiveSection, Picture
from mae_vit.objectives.mae import MAEConfig
from mae_vit.objectives.masked_patch import MaskedPatchConfig

OBJECTIVES: dict[str, type[ObjectiveSection]] = {
    "mae": MAEConfig,
    "masked_patch": MaskedPatchConfig,
}

if TYPE_CHECKING:
    ObjectiveConfig = ObjectiveSection
else:
    ObjectiveConfig = Annotated[Union[tuple(OBJECTIVES.values())], Field(discriminator="name")]  # noqa: UP007

__all__ = ["OBJECTIVES", "Objective", "ObjectiveConfig", "ObjectiveOutput", "ObjectiveSection", "Picture"]
