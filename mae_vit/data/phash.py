"""A perceptual hash: near-duplicates of an image have nearly the same bits.

Data processes import this file and nothing heavier.
"""

from __future__ import annotations

import numpy as np
from PIL import Image

# In `dataset.json`: two hashes of one name compare.
HASH_NAME = "pHash of 64 bits"
_SIDE, _LOW = 32, 8
# Rows are the first basis vectors of the DCT-II.
_DCT = np.cos(np.pi / (2 * _SIDE) * np.outer(np.arange(_LOW), 2 * np.arange(_SIDE) + 1))
# What a flat image's coefficients are off zero by, rounding errors alone, is far below.
_DECIMALS = 3


def phash(pixels: np.ndarray) -> tuple[int, int]:
    """Hashes an image and its mirror image, the DCT way (pHash; Zauner 2010, Sec. 3.2.1).

    The image becomes 32 x 32 gray values, whatever its shape; of its DCT's 8 x 8 lowest
    frequencies each gives a bit: whether it is above their median. Bit for bit the
    `phash` of the ImageHash library, but for flat images, whose bits it leaves to rounding
    errors; the library itself would bring PyWavelets, and scipy into each data process.

    Args:
        pixels: uint8 (C, H, W), C 1 or 3.

    Returns:
        Two integers of 64 bits.
    """
    # Plane by plane: Pillow takes long over an array whose channels come first.
    planes = [Image.fromarray(plane) for plane in pixels]
    gray = planes[0] if len(planes) == 1 else Image.merge("RGB", planes).convert("L")
    small = np.asarray(gray.resize((_SIDE, _SIDE), Image.Resampling.LANCZOS), np.float64)
    return _bits(small), _bits(small[:, ::-1])


def _bits(small: np.ndarray) -> int:
    low = np.round(_DCT @ small @ _DCT.T, _DECIMALS)
    return int.from_bytes(np.packbits(low > np.median(low)).tobytes(), "big")
