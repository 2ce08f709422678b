"""The config of a pretraining run: comparisons check it too, without the job."""

from __future__ import annotations

from typing import ClassVar

from mae_vit.config.schema import Config
from mae_vit.objectives import ObjectiveConfig


class PretrainConfig(Config):
    """A pretraining run: the common sections and an objective."""

    shrinks_batch: ClassVar[bool] = True

    objective: ObjectiveConfig
