"""A few of the views while an encoder is trained: those that cost next to nothing."""

from __future__ import annotations

import io
from dataclasses import dataclass

import numpy as np
from PIL import Image
from torch import Tensor

from mae_vit.encoder import ViTEncoder
from mae_vit.inspection.figures import to_png
from mae_vit.inspection.views import attention_views, parameter_views
from mae_vit.objectives.base import Objective, Task
from mae_vit.pretrained import Pool

_NAMES = ("attention-rollout", "attention-distance", "positions", "filters")


@dataclass(frozen=True)
class InTraining:
    """An objective's encoder as the views take one, read by [CLS]."""

    objective: Objective
    pool: Pool = "cls"

    @property
    def encoder(self) -> ViTEncoder:
        """What is trained."""
        return self.objective.encoder

    def normalize(self, images: Tensor) -> Tensor:
        """Maps uint8 (B, C, H, W) to what the encoder takes."""
        return self.objective.normalize(images)


@dataclass(frozen=True)
class SomeImages:
    """Images alone, as the views take samples."""

    images: Tensor


def draw_views(task: Task, images: Tensor) -> dict[str, np.ndarray]:
    """Draws the views: name -> uint8 (H, W, 3).

    Args:
        task: an objective in training; its mode is as before afterwards.
        images: uint8 (n, C, H, W), held out.
    """
    assert isinstance(task, Objective)
    looked = InTraining(task)
    views = [*attention_views(looked, SomeImages(images)), *parameter_views(looked)]
    return {
        view.name: view.drawn
        if isinstance(view.drawn, np.ndarray)
        else np.asarray(Image.open(io.BytesIO(to_png(view.drawn))).convert("RGB"))
        for view in views
        if view.name in _NAMES
    }
