"""Maps the class ids of masks to class + 1 (0 does not count), and crops, resizes and flips masks as their images."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mae_vit.data.images.bounds import DecodeError

if TYPE_CHECKING:
    from mae_vit.data.images.augment import Box


def id_table(ids: list[int], ignore: int) -> np.ndarray:
    """Returns uint16 (65536,): class + 1 of each id, 0 for `ignore`, 65535 for unknown ids."""
    table = np.full(1 << 16, 0xFFFF, np.uint16)
    table[ids] = np.arange(1, len(ids) + 1)
    table[ignore] = 0
    return table


def numbered(mask: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Turns ids uint16 (H, W) into class + 1, by `id_table`; raises DecodeError if a pixel has an unknown id."""
    numbers: np.ndarray = table[mask]
    unknown = numbers == 0xFFFF
    if unknown.any():
        top, left = np.argwhere(unknown)[0]
        raise DecodeError(f"pixel ({top}, {left}) has the id {mask[top, left]}, which is not a class")
    return numbers


def crop_mask(mask: np.ndarray, box: Box, flip: bool, img_size: tuple[int, int]) -> np.ndarray:
    """Crops, resizes (to the nearest pixel) and flips a mask (H, W) as `Augment` does its image; outside it is 0.

    Returns:
        (*img_size).
    """
    top, left, height, width = box
    # Nearest neighbor: the mask pixel that holds the middle of the result's pixel.
    rows = top + (np.arange(img_size[0]) * 2 + 1) * height // (2 * img_size[0])
    columns = left + (np.arange(img_size[1]) * 2 + 1) * width // (2 * img_size[1])
    inside = [
        (places >= 0) & (places < size) for places, size in zip((rows, columns), mask.shape, strict=True)
    ]
    cut = mask[np.clip(rows, 0, mask.shape[0] - 1)[:, None], np.clip(columns, 0, mask.shape[1] - 1)]
    cut = np.where(inside[0][:, None] & inside[1], cut, 0)
    return cut[:, ::-1] if flip else cut
