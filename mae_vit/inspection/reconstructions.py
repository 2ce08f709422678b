"""What a pretrained objective makes of hidden patches, at other ratios and shapes than it was trained with.

Shapes: B images, C channels, H W pixels.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from mae_vit.batch import Batch
from mae_vit.inspection.masks import MASK_KINDS, MaskKind, mask_ranks
from mae_vit.masking import num_masked_patches
from mae_vit.objectives.base import Objective, Picture
from mae_vit.objectives.mae import MAE
from mae_vit.objectives.reconstruction import (
    error_sums,
    local_average,
    psnr_metrics,
    reconstruction_pictures,
)

# MAE Fig. 5 goes from few to many; 75 % is what it is trained with.
_RATIOS = (0.5, 0.75, 0.9)


@dataclass(frozen=True)
class Reconstruction:
    """One way of hiding patches.

    Attributes:
        kind: of the mask; "as trained" for objectives with masks of their own.
        ratio: share that is hidden.
        rows: masked, predicted, pasted, original.
        metrics: over all images of the batch.
    """

    kind: str
    ratio: float
    rows: list[Picture]
    metrics: dict[str, float]


@torch.no_grad()
def reconstruct(objective: Objective, batch: Batch, *, shown: int) -> list[Reconstruction]:
    """Reconstructs images at several ratios with masks of each kind.

    Objectives other than MAE hide patches in one way, their own: they are shown as trained.

    Args:
        objective: with trained parts, in evaluation mode.
        batch: images; all of them are measured.
        shown: how many of them are drawn.
    """
    if not isinstance(objective, MAE):
        metrics = objective.evaluation_metrics(
            {name: float(value) for name, value in objective.evaluation_sums(batch).items()}
        )
        return [
            Reconstruction(
                "as trained", objective.hidden_ratio, objective.pictures(_first(batch, shown)), metrics
            )
        ]
    count = objective.encoder.num_patches
    fitting = [ratio for ratio in _RATIOS if 0 < num_masked_patches(count, ratio) < count]
    return [_at(objective, batch, kind, ratio, shown) for kind in MASK_KINDS for ratio in fitting]


def _at(mae: MAE, batch: Batch, kind: MaskKind, ratio: float, shown: int) -> Reconstruction:
    images = mae.normalize(batch.images)
    prediction, mask = mae.reconstruct(
        images, mask_ranks(kind, batch.keys, mae.encoder.grid_size), mask_ratio=ratio
    )
    _, mean, scale = mae.targets(images)
    pixels = prediction.float() * scale + mean
    # As in training: what needs no learning.
    baseline = mean.expand_as(pixels) if mae.norm_pix_loss else local_average(images, mask, mae.encoder)
    sums = error_sums(mae, images, pixels, baseline, mask)
    label = "predicted (true patch mean and std)" if mae.norm_pix_loss else "predicted"
    rows = reconstruction_pictures(mae, batch.images[:shown], pixels[:shown], mask[:shown], label)
    return Reconstruction(
        kind, ratio, rows, psnr_metrics({name: float(value) for name, value in sums.items()})
    )


def _first(batch: Batch, count: int) -> Batch:
    keys = replace(batch.keys, index=batch.keys.index[:count])
    return Batch(batch.images[:count], batch.labels[:count], keys)
