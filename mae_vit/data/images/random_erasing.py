"""Keyed random erasing: fills a box of an image with random bytes.

Zhong et al., "Random Erasing Data Augmentation", arXiv 1708.04896, Sec. 3.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from mae_vit.core.bands import RGB8, Bands
from mae_vit.core.keyed_rng import RngStream, derive_key, threefry2x32, uniform

# Share of the image's area. The paper's s_h is 0.4; timm's RandomErasing, which MAE's fine-tuning calls, uses 1/3.
_AREA = (0.02, 1 / 3)
# Smallest height over width (the paper's r_1). The largest is its inverse (r_2).
_RATIO = 0.3
# timm tries ten boxes, then erases nothing; the paper tries until one fits.
_TRIES = 10
_BLOCK_BYTES = 8  # bytes that one counter gives


@dataclass(frozen=True)
class Erasing:
    """The erased boxes of a batch.

    Attributes:
        boxes: int64 (B, 4): top, left, height, width in pixels; height 0 erases nothing.
        key: key of the random bytes, from `derive_key`.
        index: sample indices (B,).
    """

    boxes: np.ndarray
    key: tuple[int, int]
    index: np.ndarray

    def fill(self, images: np.ndarray, bands: Bands = RGB8) -> None:
        """Fills the boxes of images (B, C, H, W) in place with random bytes, independent for each pixel and channel.

        The bytes 0..255 are spread over the scale of `bands`. This is the paper's fill. It departs from timm's "pixel"
        mode, which MAE chose: that mode draws normal noise after normalization, which uint8 cannot hold.
        """
        for row, pixels in self._noise(images.shape[1]):
            top, left, height, width = self.boxes[row]
            values = pixels.reshape(-1, height, width)
            if not bands.eight_bit:
                values = _in_scale(values, bands)
            images[row, :, top : top + height, left : left + width] = values

    def _noise(self, channels: int) -> Iterator[tuple[int, np.ndarray]]:
        """Yields (index in the batch, bytes) of each erased image. One call of the hash draws all bytes."""
        rows = np.flatnonzero(self.boxes[:, 2])
        if not len(rows):
            return
        counts = channels * self.boxes[rows, 2] * self.boxes[rows, 3]
        blocks = -(-counts // _BLOCK_BYTES)
        starts = np.cumsum(blocks) - blocks
        # Counters begin at 0 in each image, so its bytes do not depend on the rest of the batch.
        counter = np.arange(blocks.sum()) - np.repeat(starts, blocks)
        samples = np.repeat(self.index[rows], blocks)
        drawn = threefry2x32(self.key, samples.astype(np.uint32), counter.astype(np.uint32))
        # "<u4": the same order of bytes on all machines.
        noise = np.stack(drawn, axis=1).astype("<u4").view(np.uint8).reshape(-1)
        for row, start, count in zip(
            rows.tolist(), (starts * _BLOCK_BYTES).tolist(), counts.tolist(), strict=True
        ):
            yield row, noise[start : start + count]


def _in_scale(noise: np.ndarray, bands: Bands) -> np.ndarray:
    """Maps bytes (C, H, W) to raw values between low and high of each band."""
    low, high = (np.array(values).reshape(-1, 1, 1) for values in (bands.low, bands.high))
    values = low + noise * ((high - low) / 255)
    if not bands.dtype.startswith("float"):
        limits = np.iinfo(bands.dtype)
        values = np.clip(np.rint(values), limits.min, limits.max)
    return values.astype(bands.dtype)


def draw_erasing(
    share: float, img_size: tuple[int, int], seed: int, epoch: int, index: np.ndarray
) -> Erasing:
    """Draws which share of the images is erased, and where; `index` (B,) has the key of each image's draws.

    It takes the first of ten boxes that fits.
    """
    numbers = uniform(derive_key(seed, RngStream.ERASE, epoch), index, 1 + 2 * _TRIES + 2)
    size = np.array(img_size)
    area = (_AREA[0] + numbers[:, 1 : 1 + _TRIES] * (_AREA[1] - _AREA[0])) * size.prod()
    ratio = np.exp((1 - 2 * numbers[:, 1 + _TRIES : 1 + 2 * _TRIES]) * np.log(_RATIO))
    tried = np.rint(np.sqrt(np.stack([area * ratio, area / ratio], axis=2))).astype(np.int64)
    fits = (tried < size).all(axis=2)
    box = tried[np.arange(len(index)), fits.argmax(axis=1)]
    # A side of 0 pixels erases nothing.
    erased = (numbers[:, 0] < share) & fits.any(axis=1) & (box > 0).all(axis=1)
    corner = np.floor(numbers[:, -2:] * (size - box + 1)).astype(np.int64)
    boxes = np.where(erased[:, None], np.concatenate([corner, box], axis=1), 0)
    return Erasing(boxes, derive_key(seed, RngStream.ERASE_NOISE, epoch), index)
