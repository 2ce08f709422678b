"""Pretraining objectives: one line in the dictionary below for each.

A plug-in adds its objective by `register_objective`. An objective of the package has its options in
`mae_vit.objectives.config`, and its own file. Config, command line and contract tests iterate over the dictionary.
"""

from __future__ import annotations

from typing import Annotated, get_args

from mae_vit.config.section import OneOf
from mae_vit.objectives.config import (
    ContrastiveMAEConfig,
    JointConfig,
    MAEConfig,
    MaskedPatchConfig,
    ObjectiveSection,
    SimMIMConfig,
    SupervisedConfig,
)

OBJECTIVES: dict[str, type[ObjectiveSection]] = {
    "mae": MAEConfig,
    "contrastive_mae": ContrastiveMAEConfig,
    "masked_patch": MaskedPatchConfig,
    "joint": JointConfig,
    "simmim": SimMIMConfig,
    "supervised": SupervisedConfig,
}

ObjectiveConfig = Annotated[ObjectiveSection, OneOf(OBJECTIVES, "name")]


def register_objective(section: type[ObjectiveSection]) -> None:
    """Adds an objective under the value of its section's `name`. A plug-in calls it on import.

    Raises ValueError if another objective has that name.
    """
    (name,) = get_args(section.model_fields["name"].annotation)
    if OBJECTIVES.setdefault(name, section) is not section:
        raise ValueError(f'there is an objective "{name}"')


__all__ = ["OBJECTIVES", "ObjectiveConfig", "ObjectiveSection", "register_objective"]
