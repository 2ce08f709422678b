"""The config of a pretraining run; not in the job's module, because comparisons check it too."""

from __future__ import annotations

from pydantic import model_validator

from mae_vit.config.schema import Config
from mae_vit.objectives import ObjectiveConfig


class PretrainConfig(Config):
    """The config of a pretraining run: the common sections and an objective."""

    objective: ObjectiveConfig

    @model_validator(mode="after")
    def _check_pretraining(self) -> PretrainConfig:
        if self.data.label_draw and self.data.leave_out_per_class is None:
            raise ValueError("data.label_draw has no effect without data.leave_out_per_class")
        if self.objective.name == "contrastive" and self.data.augment.changes_nothing:
            raise ValueError(
                'objective.name="contrastive" would compare equal views, as data.augment changes nothing; give '
                "data.augment.crop=random_resized"
            )
        self.objective.check_encoder(self.model)
        try:
            self.model.geometry()
        except ValueError as error:
            raise ValueError(f"model.{error}") from None
        return self
