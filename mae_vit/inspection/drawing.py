"""Figures and tiles of images."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image, ImageDraw

_DPI = 110
# Okabe & Ito (2008): safe for red-green color blindness.
_INK, _OTHER = "#0072b2", "#d55e00"
_MAX_CLASSES = 20
_MAX_MAPS = 16

Table = tuple[list[str], list[list[object]]]


@dataclass(frozen=True)
class View:
    """One thing to look at.

    Attributes:
        name: of its files.
        title: heading on the page.
        reading: explains the picture.
        drawn: the picture: a chart, or pixels uint8 (H, W, 3).
        table: its numbers as a CSV: head and rows.
        arrays: its numbers as an NPZ.
    """

    name: str
    title: str
    reading: str
    drawn: Figure | np.ndarray
    table: Table | None = None
    arrays: dict[str, np.ndarray] = field(default_factory=dict)


def to_png(drawn: Figure | np.ndarray) -> bytes:
    """Encodes a chart, or pixels uint8 (H, W, 3)."""
    stream = io.BytesIO()
    if isinstance(drawn, Figure):
        drawn.savefig(stream, format="png", dpi=_DPI, metadata={"Software": None})
    else:
        Image.fromarray(drawn).save(stream, "PNG", optimize=True)
    return stream.getvalue()


def by_depth(values: np.ndarray, label: str, *, alike: float, alike_label: str) -> Figure:
    """Draws a number of each head against depth.

    The axis ends at `alike`, so that charts of two encoders compare, unless a head is far above it.

    Args:
        values: (L, H), from 0 on.
        label: of the number.
        alike: the value of uniform attention, drawn as a dashed line.
        alike_label: its label.
    """
    figure, axes = _figure(5.2, 3.2)
    depth = np.arange(1, len(values) + 1)
    for head in values.T:
        axes.plot(depth, head, "o", color=_INK, markersize=5, alpha=0.7)
    axes.plot(depth, values.mean(axis=1), "-", color=_OTHER, label="mean over heads")
    axes.axhline(alike, color="gray", linestyle="--", linewidth=1, label=alike_label)
    axes.set_ylim(0, max(1.2 * alike, 1.05 * values.max(initial=0)) or 1)
    axes.set_xlabel("block")
    axes.set_ylabel(label)
    axes.set_xticks(depth if len(depth) <= 16 else depth[::4])
    axes.legend(fontsize=8)
    return figure


def similarity_grid(similarity: np.ndarray, grid_size: tuple[int, int]) -> Figure:
    """Draws each position's similarity to all others as a map, laid out as the patches are.

    Args:
        similarity: (N, N).
        grid_size: rows and columns of patches; of large grids every second, third, ... is drawn.
    """
    rows, columns = grid_size
    step = -(-max(rows, columns) // _MAX_MAPS)
    shown_rows, shown_columns = range(0, rows, step), range(0, columns, step)
    scale = 6.0 / max(len(shown_rows), len(shown_columns))
    figure = Figure(figsize=(len(shown_columns) * scale + 0.8, len(shown_rows) * scale))
    axes = figure.subplots(len(shown_rows), len(shown_columns), squeeze=False)
    for place, row in enumerate(shown_rows):
        for other, column in enumerate(shown_columns):
            part: Axes = axes[place][other]
            drawn = part.imshow(
                similarity[row * columns + column].reshape(rows, columns), vmin=-1, vmax=1, cmap="viridis"
            )
            part.set_axis_off()
    figure.subplots_adjust(left=0.01, right=0.88, top=0.99, bottom=0.01, wspace=0.06, hspace=0.06)
    figure.colorbar(drawn, cax=figure.add_axes((0.9, 0.1, 0.02, 0.8)), label="cosine similarity")
    return figure


def one_map(values: np.ndarray, label: str, place: tuple[int, int]) -> Figure:
    """Draws one map (rows, columns) with its scale, and a cross at `place`."""
    figure, axes = _figure(4.2, 3.4)
    drawn = axes.imshow(values, cmap="viridis", vmin=-1, vmax=1)
    axes.plot(place[1], place[0], "x", color="white", markersize=9, markeredgewidth=2)
    axes.set_xlabel("column of patches")
    axes.set_ylabel("row")
    figure.colorbar(drawn, ax=axes, label=label)
    return figure


def scatter(points: np.ndarray, labels: np.ndarray, classes: Sequence[str]) -> Figure:
    """Draws images as points (n, 2), colored by class; of many classes the most frequent are named."""
    figure, axes = _figure(6.4, 4.8)
    numbers, counts = np.unique(labels[labels >= 0], return_counts=True)
    named = numbers[np.argsort(-counts, kind="stable")][:_MAX_CLASSES]
    others = ~np.isin(labels, named)
    if others.any():
        axes.scatter(
            points[others, 0],
            points[others, 1],
            s=8,
            color="lightgray",
            label="others" if len(named) else None,
        )
    palette = colormaps["tab20" if len(named) > 10 else "tab10"]
    for place, number in enumerate(np.sort(named)):
        chosen = labels == number
        name = classes[number] if number < len(classes) else str(number)
        axes.scatter(points[chosen, 0], points[chosen, 1], s=10, color=palette(place), label=name)
    axes.set_xticks([])
    axes.set_yticks([])
    if len(named):
        figure.legend(loc="outside right upper", fontsize=7, markerscale=2)
    return figure


def curve(values: Sequence[float], label: str, *, most_frequent: float) -> Figure:
    """Draws a share in percent against depth, with the share of the most frequent class."""
    figure, axes = _figure(5.2, 3.2)
    depth = np.arange(1, len(values) + 1)
    axes.plot(depth, [100 * value for value in values], "o-", color=_INK)
    axes.axhline(
        100 * most_frequent, color="gray", linestyle="--", linewidth=1, label="always the most frequent class"
    )
    axes.set_ylim(0, 100)
    axes.set_xlabel("block")
    axes.set_ylabel(label)
    axes.set_xticks(depth if len(depth) <= 16 else depth[::4])
    axes.legend(fontsize=8)
    return figure


def _figure(width: float, height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots()
    axes.grid(alpha=0.2)
    return figure, axes


TILE_PX = 96
_GAP_PX = 4
_GAP_GRAY = 128
_HEADING_PX = 14


def image_tile(pixels: np.ndarray) -> np.ndarray:
    """Draws one image: uint8 (C, H, W) -> uint8 (height, width, 3), the longer side `TILE_PX`."""
    upright = pixels.transpose(1, 2, 0)
    return _sized(upright.repeat(3, axis=-1) if upright.shape[-1] == 1 else upright)


def map_tile(values: np.ndarray) -> np.ndarray:
    """Draws a map of numbers (rows, columns), none below 0, in colors from 0 to its largest."""
    shares = values / max(float(values.max()), np.finfo(np.float32).tiny)
    return _sized((colormaps["viridis"](shares)[..., :3] * 255).round().astype(np.uint8))


def overlay_tile(pixels: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Darkens an image uint8 (C, H, W) where a map (rows, columns) is low, as ViT Fig. 6 shows rollout."""
    height, width = pixels.shape[1:]
    shares = (values / max(float(values.max()), np.finfo(np.float32).tiny) * 255).astype(np.uint8)
    mask = np.asarray(Image.fromarray(shares).resize((width, height), Image.Resampling.BILINEAR))
    return image_tile((pixels * (mask[None] / 255)).astype(np.uint8))


def rows_of_tiles(rows: Sequence[Sequence[np.ndarray]], heads: Sequence[str] = ()) -> np.ndarray:
    """Puts tiles of one size into rows: uint8 (height, width, 3); shorter rows end in gray.

    `heads` stand over the columns, in a line of their own: pictures are looked at without their page, too.
    """
    width = max(map(len, rows))
    lines = [_heading(heads, rows[0][0].shape[1])] if heads else []
    for row in rows:
        tiles = [
            np.pad(tile, ((_GAP_PX, 0), (_GAP_PX, 0), (0, 0)), constant_values=_GAP_GRAY) for tile in row
        ]
        tiles += [np.full_like(tiles[0], _GAP_GRAY)] * (width - len(tiles))
        lines.append(np.concatenate(tiles, axis=1))
    return np.concatenate(lines, axis=0)


def _heading(words: Sequence[str], tile_width: int) -> np.ndarray:
    line = Image.new("RGB", (len(words) * (tile_width + _GAP_PX), _HEADING_PX), "white")
    for column, word in enumerate(words):
        ImageDraw.Draw(line).text((column * (tile_width + _GAP_PX) + _GAP_PX, 1), word, fill="black")
    return np.asarray(line)


def _sized(pixels: np.ndarray) -> np.ndarray:
    height, width = pixels.shape[:2]
    scale = TILE_PX / max(height, width)
    size = (max(1, round(width * scale)), max(1, round(height * scale)))
    # Small images keep their squares; large ones are photographs.
    way = Image.Resampling.NEAREST if scale > 1 else Image.Resampling.LANCZOS
    return np.asarray(Image.fromarray(np.ascontiguousarray(pixels)).resize(size, way))
