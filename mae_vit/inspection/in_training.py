"""Draws the views that cost next to nothing while an encoder is trained."""

from __future__ import annotations

import io
from collections.abc import Sequence

import numpy as np
from PIL import Image
from torch import Tensor

from mae_vit.inspection.attention import attention_weights
from mae_vit.inspection.figures import to_png
from mae_vit.inspection.images import as_drawn
from mae_vit.inspection.views import head_views, position_view, rollout_view
from mae_vit.objectives.objective import Objective, Task


def draw_views(
    task: Task, images: Tensor, picture_bands: Sequence[int | str] | None = None
) -> dict[str, np.ndarray]:
    """Draws rollout, attention distance and positions of an objective in training: name -> uint8 (H, W, 3).

    Distances are averaged over `images`, raw values (n, C, H, W) on its device. It keeps its mode.
    """
    assert isinstance(task, Objective)
    encoder, shown = task.encoder, as_drawn(images, task.bands, picture_bands)
    weights = attention_weights(encoder, task.normalize(images))
    distance = next(head_views(task, images))
    views = [rollout_view(encoder, shown, weights, "mean"), distance, position_view(encoder)]
    return {
        view.name: np.asarray(Image.open(io.BytesIO(to_png(view.drawn))).convert("RGB")) for view in views
    }
