"""Pictures: rows of images and maps, and charts."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor

from mae_vit.core.image_rows import Picture, draw_rows

_DPI = 110
# Okabe & Ito (2008): safe for red-green color blindness.
_INK, _OTHER = "#0072b2", "#d55e00"
_MAX_MAPS = 16
# The longer side of an image in rows: large enough to see, small enough for a page.
_TILE_PX = 96

Table = tuple[list[str], list[list[object]]]


@dataclass(frozen=True)
class View:
    """A picture, its text and its numbers.

    Attributes:
        name: name of its files.
        title: heading on the page.
        reading: explains the picture.
        drawn: the picture: a chart, or pixels uint8 (H, W, 3).
        table: its numbers as a CSV: head and rows.
    """

    name: str
    title: str
    reading: str
    drawn: Figure | np.ndarray
    table: Table | None = None


def to_png(drawn: Figure | np.ndarray) -> bytes:
    """Encodes a chart, or pixels uint8 (H, W, 3)."""
    stream = io.BytesIO()
    if isinstance(drawn, Figure):
        drawn.savefig(stream, format="png", dpi=_DPI, metadata={"Software": None})
    else:
        Image.fromarray(drawn).save(stream, "PNG", optimize=True)
    return stream.getvalue()


def draw_tiles(rows: Sequence[Picture]) -> np.ndarray:
    """Draws labeled rows of images and maps, all at the size of the first: uint8 (height, width, 3)."""
    height, width = rows[0].images.shape[2:]
    scale = _TILE_PX / max(height, width)
    size = (max(1, round(height * scale)), max(1, round(width * scale)))
    return draw_rows([Picture(row.label, _resized(row.images.float().cpu(), size)) for row in rows])


def _resized(images: Tensor, size: tuple[int, int]) -> Tensor:
    # Enlarged images and maps show their pixels as squares; large images are photographs.
    if images.shape[2] <= size[0]:
        return F.interpolate(images, size, mode="nearest-exact")
    return F.interpolate(images, size, mode="bilinear", antialias=True)


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
    figure = Figure(figsize=(5.2, 3.2), layout="constrained")
    axes = figure.subplots()
    axes.grid(alpha=0.2)
    depth = np.arange(1, len(values) + 1)
    axes.plot(depth, values, "o", color=_INK, markersize=5, alpha=0.7)
    axes.plot(depth, values.mean(axis=1), "-", color=_OTHER, label="mean over heads")
    axes.axhline(uniform, color="gray", linestyle="--", linewidth=1, label=uniform_label)
    axes.set_ylim(0, max(1.2 * uniform, 1.05 * values.max(initial=0)) or 1)
    axes.set_xlabel("block")
    axes.set_ylabel(label)
    axes.set_xticks(depth if len(depth) <= 16 else depth[::4])
    axes.legend(fontsize=8)
    return figure


def similarity_grid(similarity: np.ndarray, grid_size: tuple[int, int]) -> Figure:
    """Draws each position's similarity (N, N) to all others as a map, laid out as the patches are.

    In large grids every second, third, ... position is drawn.
    """
    rows, columns = grid_size
    step = -(-max(rows, columns) // _MAX_MAPS)
    shown_rows, shown_columns = range(0, rows, step), range(0, columns, step)
    scale = 6.0 / max(len(shown_rows), len(shown_columns))
    figure = Figure(figsize=(len(shown_columns) * scale + 0.8, len(shown_rows) * scale))
    parts = figure.subplots(len(shown_rows), len(shown_columns), squeeze=False)
    for row, line in zip(shown_rows, parts, strict=True):
        for column, part in zip(shown_columns, line, strict=True):
            assert isinstance(part, Axes)
            values = similarity[row * columns + column].reshape(rows, columns)
            drawn = part.imshow(values, vmin=-1, vmax=1, cmap="viridis")
            part.set_axis_off()
    figure.subplots_adjust(left=0.01, right=0.88, top=0.99, bottom=0.01, wspace=0.06, hspace=0.06)
    figure.colorbar(drawn, cax=figure.add_axes((0.9, 0.1, 0.02, 0.8)), label="cosine similarity")
    return figure
