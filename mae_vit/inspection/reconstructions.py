"""Reconstructions of masked images, under several kinds of masks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from mae_vit.core.batch import Batch
from mae_vit.core.image_rows import Picture
from mae_vit.core.keyed_rng import SampleKeys
from mae_vit.models.masking import Masking, random_masking, unit_masking
from mae_vit.models.sizes import num_masked_patches
from mae_vit.objectives.mae import MAE
from mae_vit.objectives.objective import Objective, as_numbers
from mae_vit.objectives.reconstruction import psnr_metrics, reconstruction_pictures

MaskKind = Literal["random", "block", "grid"]
MASK_KINDS: tuple[MaskKind, ...] = ("random", "block", "grid")


def draw_masking(
    kind: MaskKind, keys: SampleKeys, grid_size: tuple[int, int], ratio: float, mask_unit: int
) -> Masking:
    """Masks images by a kind of `MASK_KINDS` (MAE Fig. 6).

    "random" masks whole units, as training does; "block" a square around the middle; "grid" leaves a regular lattice.
    """
    if kind == "random":
        return unit_masking(keys, grid_size, ratio, mask_unit)
    rows, columns = grid_size
    num_patches = rows * columns
    row, column = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    if kind == "block":
        # Patches far from the middle stay visible. Relative distances give the block the image's shape.
        off = torch.stack([((row + 0.5) / rows - 0.5).abs(), ((column + 0.5) / columns - 0.5).abs()])
        order = (-off.max(dim=0).values * 2 * num_patches).round().long() + num_patches
    else:
        order = _bayer(max(rows, columns))[row, column]
    # The patches of the lowest noise are kept.
    noise = (order.flatten() * num_patches + torch.arange(num_patches)).to(keys.index.device)
    return random_masking(noise.expand(len(keys.index), -1), ratio)


def _bayer(size: int) -> Tensor:
    """Returns the ordered-dithering matrix, whose lowest values are always spread evenly."""
    matrix = torch.zeros(1, 1, dtype=torch.int64)
    while len(matrix) < size:
        upper = torch.cat([4 * matrix, 4 * matrix + 2], dim=1)
        matrix = torch.cat([upper, torch.cat([4 * matrix + 3, 4 * matrix + 1], dim=1)])
    return matrix


# MAE Fig. 5 compares several ratios; 75 % is the ratio of training.
_RATIOS = (0.5, 0.75, 0.9)


@dataclass(frozen=True)
class Reconstruction:
    """Reconstructions under masks of a kind.

    Attributes:
        kind: kind of the mask; "as trained" for objectives with masks of their own.
        ratio: share of patches that is masked.
        rows: masked, predicted, pasted, original.
        metrics: metrics over the whole batch.
    """

    kind: str
    ratio: float
    rows: list[Picture]
    metrics: dict[str, float]


@torch.no_grad()
def reconstruct(objective: Objective, batch: Batch, *, shown: int) -> list[Reconstruction]:
    """Reconstructs images at several ratios with masks of each kind; all are measured, the first `shown` drawn.

    Objectives other than MAE mask patches only in their own way: they are shown as trained.
    """
    if not isinstance(objective, MAE):
        sums = as_numbers(objective.evaluation_sums(batch))
        keys = replace(batch.keys, index=batch.keys.index[:shown])
        rows = objective.pictures(Batch(batch.images[:shown], batch.labels[:shown], keys))
        return [Reconstruction("as trained", objective.mask_ratio, rows, objective.evaluation_metrics(sums))]
    # Ratios that mask some, but not all, of training's units also do so with the smaller patches.
    count = objective.encoder.num_patches // objective.mask_unit**2
    fitting = [ratio for ratio in _RATIOS if 0 < num_masked_patches(count, ratio) < count]
    return [_at(objective, batch, kind, ratio, shown) for kind in MASK_KINDS for ratio in fitting]


def _at(mae: MAE, batch: Batch, kind: MaskKind, ratio: float, shown: int) -> Reconstruction:
    images, valid = mae.normalize(batch.images), mae.valid_patches(batch.images)
    masking = draw_masking(kind, batch.keys, mae.encoder.grid_size, ratio, mae.mask_unit)
    prediction, mask = mae.predict_all(images, masking), masking.mask
    pixels, _ = mae.undo_targets(images, prediction, valid)
    # The baseline is the same as in training.
    sums = mae.pixel_errors(images, prediction, mask, valid)
    rows = reconstruction_pictures(
        mae, batch.images[:shown], pixels[:shown], mask[:shown], mae.predicted_label
    )
    return Reconstruction(
        kind, ratio, rows, psnr_metrics({name: float(value) for name, value in sums.items()})
    )
