"""Pictures: rows of images and maps, and charts in the style of pages."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib import colormaps
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor
from torchvision.utils import make_grid

from mae_vit.core.image_rows import Picture, draw_rows
from mae_vit.pages import charts

_DPI = 110
_MAX_MAPS = 16
# The longer side of all maps of positions together.
_MAPS_PX = 640
# The longer side of an image in rows: large enough to see, small enough for a page.
_TILE_PX = 96

Table = tuple[list[str], list[list[object]]]


@dataclass(frozen=True)
class View:
    """A picture, its text and its numbers.

    Attributes:
        name: name of its files.
        finding: what it shows of this encoder, a clause that begins with the verb; empty if readers judge.
        drawn: the picture: a chart, or pixels uint8 (H, W, 3).
        table: its numbers as a CSV: head and rows.
    """

    name: str
    title: str
    reading: str
    drawn: Figure | np.ndarray
    finding: str = ""
    table: Table | None = None


def to_png(drawn: Figure | np.ndarray) -> bytes:
    """Encodes a chart, or pixels uint8 (H, W, 3)."""
    stream = io.BytesIO()
    if isinstance(drawn, Figure):
        drawn.savefig(stream, format="png", dpi=_DPI, facecolor="white", metadata={"Software": None})
    else:
        Image.fromarray(drawn).save(stream, "PNG", optimize=True)
    return stream.getvalue()


def draw_tiles(rows: Sequence[Picture]) -> np.ndarray:
    """Draws labeled rows of images and maps, all at the size of the first: uint8 (height, width, 3)."""
    height, width = rows[0].images.shape[2:]
    scale = _TILE_PX / max(height, width)
    size = (max(1, round(height * scale)), max(1, round(width * scale)))
    tiles = []
    for row in rows:
        # Enlarged images and maps show their pixels as squares; large images are photographs.
        larger = row.images.shape[2] > size[0]
        mode, antialias = ("bilinear", True) if larger else ("nearest-exact", False)
        images = F.interpolate(row.images.float().cpu(), size, mode=mode, antialias=antialias)
        tiles.append(Picture(row.label, images))
    return draw_rows(tiles)


def in_false_color(maps: Tensor) -> Tensor:
    """Colors non-negative maps (n, rows, columns), each from 0 to its largest value: (n, 3, rows, columns)."""
    largest = maps.amax(dim=(1, 2), keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
    colors = colormaps["viridis"]((maps / largest).cpu().numpy())[..., :3]
    return torch.from_numpy(colors).float().movedim(-1, 1)


def darkened(images: Tensor, maps: Tensor) -> Tensor:
    """Darkens images (n, C, H, W) where a map (n, rows, columns) is low, as ViT Fig. 6 shows rollout."""
    shares = maps / maps.amax(dim=(1, 2), keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
    return images * F.interpolate(shares[:, None], images.shape[2:], mode="bilinear")


def by_depth(values: np.ndarray, label: str, *, uniform: float, uniform_label: str) -> Figure:
    """Draws each head's value (L, H) against depth; a dashed line marks uniform attention.

    The axis runs from 0 to just above `uniform`, so that charts compare, unless a head is far above it.
    """
    depth = np.arange(1, len(values) + 1)
    with charts.chart("block", label, width=5.2, height=3.2) as (figure, axes):
        axes.plot(depth, values, "o", color=charts.COLORS[0], markersize=5, alpha=0.7)
        axes.plot(
            depth, values.mean(axis=1), "o-", color=charts.COLORS[1], markersize=3, label="mean over heads"
        )
        axes.axhline(uniform, color="gray", linestyle="--", linewidth=1, label=uniform_label)
        axes.set_ylim(0, max(1.2 * uniform, 1.05 * values.max(initial=0)) or 1)
        axes.set_xlim(0.5, len(values) + 0.5)
        axes.set_xticks(depth if len(depth) <= 16 else depth[::4])
        charts.legend_below(figure)
        return figure


def similarity_grid(similarity: np.ndarray, grid_size: tuple[int, int]) -> np.ndarray:
    """Draws each position's similarity (N, N), -1 to 1, to all others as a map, laid out as the patches are.

    In large grids every second, third, ... position is drawn. Returns uint8 (height, width, 3).
    """
    step = -(-max(grid_size) // _MAX_MAPS)
    maps = similarity.reshape(*grid_size, *grid_size)[::step, ::step]
    colors = torch.from_numpy(colormaps["viridis"]((maps + 1) / 2)[..., :3]).flatten(0, 1).movedim(-1, 1)
    grid = make_grid(colors, nrow=maps.shape[1], padding=1, pad_value=1.0).movedim(0, -1)
    zoom = max(1, _MAPS_PX // max(grid.shape))
    return (grid.numpy() * 255).astype(np.uint8).repeat(zoom, axis=0).repeat(zoom, axis=1)
