"""Bands one by one: the images that are looked at, and reconstructions of them.

Shapes: n images, C bands, H W pixels.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from mae_vit.core.bands import Bands
from mae_vit.core.composites import in_colors
from mae_vit.inspection.drawing import View, image_tile, rows_of_tiles
from mae_vit.inspection.images import Samples
from mae_vit.inspection.reconstructions import Reconstruction
from mae_vit.objectives.objective import Objective

_SHOWN = 4
# More columns are no picture any more: of hyperspectral images every second, third, ... band is drawn.
_MOST_COLUMNS = 20


def in_bands(one: Reconstruction, samples: Samples) -> Reconstruction:
    """Returns a reconstruction with its rows in colors."""
    return replace(one, rows=in_colors(one.rows, samples.bands, samples.picture_bands))


def band_views(objective: Objective | None, samples: Samples) -> Iterator[View]:
    """Draws each band in gray, of some images and of their reconstructions; nothing of 8-bit gray or RGB."""
    bands = samples.bands
    if bands is None:
        return
    columns = range(0, len(bands.names), -(-len(bands.names) // _MOST_COLUMNS))
    names = [bands.names[band] for band in columns]
    ends = ", ".join(f"{bands.names[band]} {bands.low[band]:g} to {bands.high[band]:g}" for band in columns)
    scale = f"Black and white are the ends of each band's scale, in raw values: {ends}."
    raw = samples.images[:_SHOWN]
    yield View(
        "bands",
        f"Images by band ({len(bands.names)} of {bands.dtype})",
        f"Each band in gray, a line for each image. {scale} Missing values are black.",
        rows_of_tiles([_tiles(_unit(one[None], bands)[0], columns) for one in raw], names),
        _statistics(samples, bands),
    )
    if objective is None:
        return
    with torch.no_grad():
        rows = objective.pictures(samples.batch(1).to(objective.mean.device))
    yield View(
        "reconstructions-bands",
        "Reconstructions by band",
        f"One image by band, a line each: {', '.join(row.label for row in rows)}. {scale}",
        rows_of_tiles([_tiles(row.images[0].float().cpu(), columns) for row in rows], names),
    )


def _unit(images: Tensor, bands: Bands) -> Tensor:
    """Maps raw images to 0..1, missing values to 0."""
    unit, valid = bands.unit(images), bands.valid(images)
    return unit if valid is None else torch.where(valid, unit, 0.0)


def _tiles(image: Tensor, columns: range) -> list[np.ndarray]:
    """Draws bands of an image (C, H, W) in 0..1."""
    pixels = (image.clamp(0, 1) * 255).round().byte().numpy()
    return [image_tile(pixels[band : band + 1]) for band in columns]


def _statistics(samples: Samples, bands: Bands) -> tuple[list[str], list[list[object]]]:
    """Returns raw minimum, mean and maximum of each band over the images, and the share of missing values."""
    valid = bands.valid(samples.images)
    rows: list[list[object]] = []
    for band, name in enumerate(bands.names):
        values = samples.images[:, band].double()
        there = values if valid is None else values[valid[:, band]]
        missing = 1 - there.numel() / values.numel()
        facts = [float(there.min()), float(there.mean()), float(there.max())] if there.numel() else [None] * 3
        rows.append([name, *facts, missing])
    return ["band", "min", "mean", "max", "missing_share"], rows
