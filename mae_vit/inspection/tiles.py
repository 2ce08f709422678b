"""Pictures made of squares: images and maps side by side."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib import colormaps
from PIL import Image, ImageDraw

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
