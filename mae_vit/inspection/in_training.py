"""A few of the views while an encoder is trained: those that cost next to nothing."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image
from torch import Tensor

from mae_vit.inspection.attention import attention_weights
from mae_vit.inspection.figures import to_png
from mae_vit.inspection.images import as_drawn
from mae_vit.inspection.views import head_views, position_view, rollout_view
from mae_vit.models.encoders.base import Encoder
from mae_vit.models.sizes import Pool
from mae_vit.objectives.objective import Objective, Task


@dataclass(frozen=True)
class InTraining:
    """An objective's encoder as the views take one, read by the mean of the patches."""

    objective: Objective
    pool: Pool = "mean"

    @property
    def encoder(self) -> Encoder:
        """What is trained."""
        return self.objective.encoder

    def normalize(self, images: Tensor) -> Tensor:
        """Maps raw images (B, C, H, W) to what the encoder takes."""
        return self.objective.normalize(images)


def draw_views(
    task: Task, images: Tensor, picture_bands: Sequence[int | str] | None = None
) -> dict[str, np.ndarray]:
    """Draws rollout, attention distance and positions: name -> uint8 (H, W, 3).

    Args:
        task: an objective in training; its mode is as before afterwards.
        images: raw values (n, C, H, W), held out, on its device: what distances are averaged over.
        picture_bands: the bands that images are drawn in; None chooses.
    """
    assert isinstance(task, Objective)
    model, shown = InTraining(task), as_drawn(images, task.bands, picture_bands)
    weights = attention_weights(model.encoder, model.normalize(images))
    distance = next(head_views(model, images))
    views = [rollout_view(model, shown, weights), distance, position_view(model.encoder)]
    return {
        view.name: np.asarray(Image.open(io.BytesIO(to_png(view.drawn))).convert("RGB")) for view in views
    }
