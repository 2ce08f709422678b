"""The config of a pretraining run. It is apart from the job, because comparisons check it too."""

from __future__ import annotations

from typing import ClassVar

from mae_vit.config.schema import Config
from mae_vit.objectives import ObjectiveConfig


class PretrainConfig(Config):
    """The config of a pretraining run: the common sections and an objective."""

    shrinks_batch: ClassVar[bool] = True

    objective: ObjectiveConfig
