"""A few test images with true and predicted classes, as one picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor

from mae_vit.core.bands import RGB8
from mae_vit.core.image_rows import Picture, in_colors, label_font
from mae_vit.inspection.figures import draw_tiles, to_png

# Share of the class's color over the image.
_TINT = 0.6
_IGNORED = (128, 128, 128)
_NAME_PX, _LINE_PX = 110, 14


def class_colors(num_classes: int) -> np.ndarray:
    """Returns a color for each class, uint8 (K, 3): the colors of Pascal VOC's masks, the first black."""
    colors, bits = np.zeros((num_classes, 3), int), np.arange(num_classes)
    for place in range(7, -1, -1):
        for channel in range(3):
            colors[:, channel] |= (bits >> channel & 1) << place
        bits >>= 3
    return colors.astype(np.uint8)


def class_tint(numbers: Tensor, num_classes: int) -> Tensor:
    """Returns the tint of a `Picture` for classes int64 (B, H, W): (B, 4, H, W).

    Class 0 stays clear; pixels that do not count (-1) turn gray.
    """
    colors = np.concatenate([class_colors(num_classes), [_IGNORED]]) / 255
    opacity = np.full((len(colors), 1), _TINT)
    opacity[0] = 0
    tints = torch.from_numpy(np.concatenate([colors, opacity], axis=1)).float()
    return tints.to(numbers.device)[numbers].permute(0, 3, 1, 2)


def draw_class_maps(
    pixels: np.ndarray, maps: Mapping[str, np.ndarray], classes: Sequence[str], truth: np.ndarray
) -> bytes:
    """Draws the images, a row for each of `maps`, and a legend of the classes in `truth`, as a PNG.

    Class 0 stays clear; pixels that do not count (-1) turn gray. Images are uint8 (n, C, H, W) with C 1 or 3; maps
    and `truth` are int (n, H, W).
    """
    images = torch.from_numpy(pixels).float().expand(-1, 3, -1, -1) / 255
    rows = [Picture("image", images)]
    for title, numbers in maps.items():
        rows.append(Picture(title, images, class_tint(torch.from_numpy(numbers).long(), len(classes))))
    tiles = draw_tiles(in_colors(rows, RGB8))
    shown = [number for number in np.unique(truth).tolist() if number > 0]
    legend = _legend([classes[k] for k in shown], class_colors(len(classes))[shown], tiles.shape[1])
    return to_png(np.concatenate([tiles, legend]))


def _legend(names: Sequence[str], colors: np.ndarray, width: int) -> np.ndarray:
    """Draws names and their colors (k, 3), as many side by side as fit into `width` pixels."""
    columns = max(1, width // _NAME_PX)
    page = Image.new("RGB", (width, _LINE_PX * -(-len(names) // columns) + 2), "white")
    draw = ImageDraw.Draw(page)
    for number, (name, color) in enumerate(zip(names, colors.tolist(), strict=True)):
        top, left = _LINE_PX * (number // columns), _NAME_PX * (number % columns)
        draw.rectangle((left, top + 2, left + 10, top + 12), fill=tuple(color))
        draw.text((left + 14, top + 1), name[: (_NAME_PX - 14) // 6], fill="black", font=label_font())
    return np.asarray(page)
