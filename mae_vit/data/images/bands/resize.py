"""Crops of bands: resized in float32, rounded back to their type, without missing pixels."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F

# Below this share of valid weight a value is no more than a guess, and is drawn towards the mean of the crop.
_LEAST_WEIGHT = 0.25
# Rows of the result that are computed at once: few enough that most of their weights are not zero.
_BLOCK = 16


def resize_bands(
    image: np.ndarray, img_size: tuple[int, int], nodata: float | None, *, flip: bool = False
) -> np.ndarray:
    """Resizes an image (C, H, W) by antialiased bicubic interpolation; to mirror it costs nothing here.

    A pixel is missing in the result if the nearest pixel of the image is; others are interpolated from pixels
    with a value alone.

    Returns:
        (C, *img_size) of the same type; whole numbers are rounded and clipped to their range.
    """
    missing = _missing(image, nodata)
    if missing is None:
        return _as_valid(_interpolate(image, img_size, flip), image.dtype, nodata)
    valid = (~missing).astype(np.float32)
    filled = np.where(missing, 0, image).astype(np.float32)
    # Zero lies far from the values: only differences to their mean are spread into gaps.
    pixels = np.maximum(valid.sum(axis=(1, 2), keepdims=True, dtype=np.float64), 1)
    mean = (filled.sum(axis=(1, 2), keepdims=True, dtype=np.float64) / pixels).astype(np.float32)
    weight = np.maximum(_interpolate(valid, img_size, flip), _LEAST_WEIGHT)
    spread = _interpolate((filled - mean) * valid, img_size, flip) / weight + mean
    out = _as_valid(spread, image.dtype, nodata)
    gaps = _nearest(missing, img_size)
    out[gaps[..., ::-1] if flip else gaps] = np.nan if nodata is None else nodata
    return out


def _missing(image: np.ndarray, nodata: float | None) -> np.ndarray | None:
    """Returns which pixels are missing, bool (C, H, W); None if none is."""
    if nodata is None and image.dtype.kind != "f":
        return None
    missing = np.isnan(image) if image.dtype.kind == "f" else np.zeros(image.shape, bool)
    if nodata is not None:
        missing |= image == image.dtype.type(nodata)
    return missing if missing.any() else None


def _interpolate(image: np.ndarray, img_size: tuple[int, int], flip: bool) -> np.ndarray:
    """Resizes (C, H, W) in float32, as `torch.nn.functional.interpolate` does but in half of its time.

    Each output row is a weighted sum of a few input rows, and likewise columns: products with the blocks of a matrix
    that are not zero.
    """
    count, height, width = image.shape
    (high, wide), bands = img_size, np.ascontiguousarray(image.transpose(1, 0, 2), np.float32)
    rows = bands.reshape(height, count * width)
    tall = np.empty((high, count * width), np.float32)
    for top, first, weights in _weights(height, high, False):
        np.matmul(weights, rows[first : first + weights.shape[1]], out=tall[top : top + len(weights)])
    columns, out = torch.from_numpy(tall).view(high * count, width), torch.empty(high * count, wide)
    for left, first, weights in _weights(width, wide, flip):
        # NumPy would copy to and from a block of columns.
        block = out[:, left : left + len(weights)]
        torch.mm(columns[:, first : first + weights.shape[1]], torch.from_numpy(weights).T, out=block)
    return out.numpy().reshape(high, count, wide).transpose(1, 0, 2)


@lru_cache(maxsize=1024)
def _weights(old: int, new: int, flip: bool) -> tuple[tuple[int, int, np.ndarray], ...]:
    """Returns torch's weights of an antialiased bicubic resize, in blocks: (first output, first input, weights)."""
    identity = torch.eye(old)[None, None]
    whole = F.interpolate(identity, (new, old), mode="bicubic", antialias=True)[0, 0].numpy()
    whole = whole[::-1] if flip else whole
    blocks = []
    for top in range(0, new, _BLOCK):
        block = whole[top : top + _BLOCK]
        used = np.flatnonzero(block.any(axis=0))
        blocks.append((top, int(used[0]), np.ascontiguousarray(block[:, used[0] : used[-1] + 1])))
    return tuple(blocks)


def _as_valid(values: np.ndarray, dtype: np.dtype, nodata: float | None) -> np.ndarray:
    """Returns `to_type`, with values that equal `nodata` moved by one step: interpolation may have met it."""
    out = to_type(values, dtype)
    if nodata is not None:
        if dtype.kind == "f":
            step = float(np.spacing(dtype.type(nodata)))
        else:
            step = -1 if nodata == np.iinfo(dtype).max else 1
        out[out == nodata] = nodata + step
    return out


def to_type(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Converts floating-point values; whole numbers are rounded and clipped to their range, in place."""
    if dtype.kind == "f":
        return values.astype(dtype, copy=False)
    limits = np.iinfo(dtype)
    np.rint(values, out=values)
    return np.clip(values, limits.min, limits.max, out=values).astype(dtype)


def _nearest(missing: np.ndarray, img_size: tuple[int, int]) -> np.ndarray:
    rows, columns = (
        ((np.arange(size) + 0.5) * old / size).astype(np.int64)
        for size, old in zip(img_size, missing.shape[1:], strict=True)
    )
    return missing[:, rows[:, None], columns]
