"""Pretraining objectives. Each has one file, and one line in the dictionary below.

To add one, write `mae_vit/objectives/NAME.py` with an `ObjectiveSection` (its
`name` is a Literal) and an `Objective`, and list the section here. Config, command
line and contract tests iterate over the dictionary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Union

from pydantic import Field

from mae_vit.core.image_rows import Picture
from mae_vit.objectives.contrastive_mae import ContrastiveMAEConfig
from mae_vit.objectives.joint import JointConfig
from mae_vit.objectives.mae import MAEConfig
from mae_vit.objectives.masked_patch import MaskedPatchConfig
from mae_vit.objectives.objective import Objective, ObjectiveOutput, ObjectiveSection
from mae_vit.objectives.simmim import SimMIMConfig
from mae_vit.objectives.supervised import SupervisedConfig

OBJECTIVES: dict[str, type[ObjectiveSection]] = {
    "mae": MAEConfig,
    "contrastive_mae": ContrastiveMAEConfig,
    "masked_patch": MaskedPatchConfig,
    "joint": JointConfig,
    "simmim": SimMIMConfig,
    "supervised": SupervisedConfig,
}

if TYPE_CHECKING:
    ObjectiveConfig = ObjectiveSection
else:
    ObjectiveConfig = Annotated[Union[tuple(OBJECTIVES.values())], Field(discriminator="name")]  # noqa: UP007

__all__ = ["OBJECTIVES", "Objective", "ObjectiveConfig", "ObjectiveOutput", "ObjectiveSection", "Picture"]
