"""A few test images with true and predicted classes, as one picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from textwrap import wrap

import numpy as np
from PIL import Image, ImageDraw

# Share of the class's color over the image.
_TINT = 0.6
_IGNORED = (128, 128, 128)
_TILE_PX, _LABEL_PX, _LETTER_PX, _GAP_PX = 96, 14, 6, 2


def class_colors(num_classes: int) -> np.ndarray:
    """Returns a color for each class, uint8 (K, 3): the colors of Pascal VOC's masks, the first black."""
    colors = np.zeros((num_classes, 3), np.uint8)
    for number in range(num_classes):
        bits = number
        for place in range(7, -1, -1):
            for channel in range(3):
                colors[number, channel] |= (bits >> channel & 1) << place
            bits >>= 3
    return colors


def overlay(pixels: np.ndarray, classes: np.ndarray, num_classes: int) -> np.ndarray:
    """Lays the classes' colors over an image; class 0 stays clear, pixels that do not count turn gray.

    Args:
        pixels: uint8 (C, H, W), C 1 or 3.
        classes: int (H, W), -1 where a pixel does not count.
        num_classes: K.

    Returns:
        uint8 (H, W, 3).
    """
    image = np.broadcast_to(pixels, (3, *pixels.shape[1:])).transpose(1, 2, 0)
    tint = np.concatenate([class_colors(num_classes), [_IGNORED]])[classes]
    shown = (1 - _TINT) * image + _TINT * tint
    return np.where((classes != 0)[..., None], shown, image).round().astype(np.uint8)


def draw_class_maps(
    pixels: np.ndarray, columns: Mapping[str, np.ndarray], classes: Sequence[str], truth: np.ndarray
) -> Image.Image:
    """Draws a line for each image: the image, then the classes of each column; below, the names of the colors.

    Args:
        pixels: uint8 (n, C, H, W).
        columns: title -> int (n, H, W).
        classes: names.
        truth: int (n, H, W), whose classes are named.
    """
    num = len(classes)
    tiles = [[("image", np.broadcast_to(one, (3, *one.shape[1:])).transpose(1, 2, 0))] for one in pixels]
    for number, row in enumerate(tiles):
        row += [(title, overlay(pixels[number], maps[number], num)) for title, maps in columns.items()]
    zoom = max(1, -(-_TILE_PX // pixels.shape[3]))
    height, width = pixels.shape[2] * zoom, pixels.shape[3] * zoom
    step_x, step_y = width + _GAP_PX, height + _GAP_PX
    shown = [k for k in np.unique(truth).tolist() if k > 0]
    legend_lines = -(-len(shown) // len(tiles[0]))
    titles = ["\n".join(wrap(title, width // _LETTER_PX)) for title, _ in tiles[0]]
    first = _LABEL_PX * max(1 + title.count("\n") for title in titles)
    below = first + len(tiles) * step_y
    page = Image.new("RGB", (len(tiles[0]) * step_x, below + _LABEL_PX * legend_lines + 2), "white")
    draw = ImageDraw.Draw(page)
    for place, title in enumerate(titles):
        draw.text((place * step_x + 2, 1), title, fill="black")
    for line, row in enumerate(tiles):
        for place, (_, tile) in enumerate(row):
            image = Image.fromarray(np.ascontiguousarray(tile)).resize(
                (width, height), Image.Resampling.NEAREST
            )
            page.paste(image, (place * step_x, first + line * step_y))
    colors = class_colors(num)
    for place, k in enumerate(shown):
        left = place % len(tiles[0]) * step_x
        top = below + place // len(tiles[0]) * _LABEL_PX
        draw.rectangle((left, top + 2, left + 10, top + 12), fill=tuple(colors[k].tolist()))
        draw.text((left + 14, top + 1), classes[k][: (width - 14) // _LETTER_PX], fill="black")
    return page
