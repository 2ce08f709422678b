"""`prepare --preview`: a contact sheet of a prepared data set, a row for each class."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image

from mae_vit.core.image_rows import Picture, draw_rows, in_colors
from mae_vit.core.messages import count_of
from mae_vit.data.batches.augmented import AugmentedSource
from mae_vit.data.batches.loader import FixedBatches
from mae_vit.data.batches.sources import TarSource
from mae_vit.data.images.augment import Augment
from mae_vit.data.index import ShardIndex, open_index
from mae_vit.data.shards.dataset_json import Dataset

_IMAGES, _CLASSES, _SIDE = 10, 40, 64
FILE_NAME = "preview.png"


def write_preview(folder: Path, dataset: Dataset, split: str) -> Path:
    """Draws the first images of each class of a split, and of those without a label, as FOLDER/preview.png.

    A row is labeled with its class and the number of images. After 40 classes one line counts the others.
    """
    index = open_index(folder, split)
    labels = np.asarray(index.labels)
    groups = [(name, np.flatnonzero(labels == number)) for number, name in enumerate(dataset.classes)]
    groups = [(name, samples) for name, samples in groups if len(samples)]
    shown, rest = groups[:_CLASSES], groups[_CLASSES:]
    if len(alone := np.flatnonzero(labels < 0)):
        shown.append(("no label" if dataset.classes else "all", alone))
    rows = []
    for name, samples in shown:
        images = _read(index, samples[:_IMAGES], dataset.channels)
        # One at a time, for each row's own colors: the last row of `in_colors` names the bands.
        rows += in_colors([Picture(f"{name}: {count_of(len(samples), 'image')}", images)], dataset.bands)
    if rest:
        left = count_of(sum(len(samples) for _, samples in rest), "image")
        more = f"and {count_of(len(rest), 'class', 'classes')} more, {left}"
        rows.append(Picture(more, torch.ones(_IMAGES, 3, _SIDE, _SIDE)))
    path = folder / FILE_NAME
    Image.fromarray(draw_rows(rows)).save(path)
    return path


def _read(index: ShardIndex, samples: np.ndarray, channels: int) -> torch.Tensor:
    """Returns the images (B, C, H, W) in 0..1, and white in the places of a row that are left."""
    source = AugmentedSource(TarSource(index, channels=channels), Augment((_SIDE, _SIDE), bands=index.bands))
    (batch,) = FixedBatches(source, samples, seed=0, batch_size=_IMAGES, replace=True)
    images = index.bands.unit(batch.images).clamp(0, 1)
    return torch.cat([images, torch.ones(_IMAGES - len(images), *images.shape[1:])])
