"""Pretraining objectives; a plug-in adds its own by `register_objective`."""

from mae_vit.objectives.config import OBJECTIVES, ObjectiveConfig, ObjectiveSection, register_objective

__all__ = ["OBJECTIVES", "ObjectiveConfig", "ObjectiveSection", "register_objective"]
