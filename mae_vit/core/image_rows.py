"""Labeled rows of images as one picture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw
from torch import Tensor


class Picture(NamedTuple):
    """One labeled row of a picture: images (B, C, H, W) in 0..1."""

    label: str
    images: Tensor


# Small images are shown at this many pixels at least.
_MIN_SHOWN_PX = 64
_LABEL_PX = 14


def draw_rows(rows: Sequence[Picture]) -> np.ndarray:
    """Draws one labeled row for each picture: uint8 (height, width, 3)."""
    tiles = []
    for row in rows:
        images = row.images.detach().float().cpu()
        if images.shape[1] == 1:
            images = images.expand(-1, 3, -1, -1)
        zoom = max(1, -(-_MIN_SHOWN_PX // min(images.shape[2:])))
        images = F.pad(F.interpolate(images, scale_factor=zoom, mode="nearest"), (1, 1, 1, 1), value=1.0)
        strip = (torch.cat(list(images), dim=2).clamp(0, 1) * 255).round().byte().permute(1, 2, 0).numpy()
        label = Image.new("RGB", (strip.shape[1], _LABEL_PX), "white")
        ImageDraw.Draw(label).text((2, 1), row.label, fill="black")
        tiles += [np.asarray(label), strip]
    return np.concatenate(tiles)
