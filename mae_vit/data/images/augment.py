"""Keyed crops, flips, policies and erasing: a sample gets the same view on every rank and worker.

Boxes are computed from the hash in float64 on the CPU, because logarithms and roots differ between devices. Numbers are
drawn for a whole batch at once, because a hash in NumPy costs time per call, not per number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from mae_vit.core.bands import RGB8, Bands
from mae_vit.core.keyed_rng import RngStream, ViewKeys, derive_key, threefry2x32
from mae_vit.data.images.bands.resize import resize_bands, to_type

# torchvision's RandomResizedCrop tries ten boxes before it falls back; timm's RandomErasing, before it erases nothing.
_TRIES = 10
# Share of the image's area to erase. The paper's s_h is 0.4; timm, which MAE's fine-tuning calls, uses 1/3.
_AREA = (0.02, 1 / 3)
# Smallest height over width (the paper's r_1). The largest is its inverse (r_2).
_RATIO = 0.3
# Values that a `BatchPolicy` changes at once on a CPU: its caches hold them several times.
_TOGETHER = 100_000
_BLOCK_BYTES = 8  # bytes that one counter gives

Interpolation = Literal["bicubic", "bilinear"]
# Top, left, height, width in pixels. Top and left may be negative; zeros fill the part outside the image.
Box = tuple[int, int, int, int]


class Policy(Protocol):
    """Changes pixels and keeps the image's size (`mae_vit.data.images.auto_augment`).

    Attributes:
        name: value of `data.augment.policy`.
    """

    name: ClassVar[str]

    def draw(self, keys: ViewKeys) -> Sequence[Any]:
        """Draws the change of each view; a false value means no change."""

    def apply(self, image: np.ndarray, calls: Any, fill: tuple[int, ...] | None) -> np.ndarray:
        """Returns the changed image, uint8 (C, H, W)."""


@runtime_checkable
class BatchPolicy(Protocol):
    """A policy that computes each pixel of a whole batch by tensor operations on whole numbers, on any device."""

    name: ClassVar[str]

    def draw_batch(self, keys: ViewKeys) -> np.ndarray:
        """Draws the change of each view as whole numbers, int64 (B, K)."""

    def apply_batch(self, images: Tensor, calls: Tensor) -> Tensor:
        """Returns the changed images uint8 (B, C, H, W), the same bits on every device."""


@dataclass(frozen=True)
class AugmentParams:
    """The drawn augmentation of a batch. `Augment.boxes` turns crops into boxes once the images' sizes are known.

    Attributes:
        flips: bool (B,), which images are mirrored.
        crops: (B, n), the crop of each image: for "pad" its shifts in pixels; for "random_resized" the share of the
            area and the width over height of each try, then the corner in 0..1; None for "none".
        calls: each image's change by the policy, (B, K) of a `BatchPolicy`; None without a policy.
        erasing: the erased boxes; None without erasing.
    """

    flips: np.ndarray
    crops: np.ndarray | None = None
    calls: Any = None
    erasing: Erasing | None = None


@dataclass(frozen=True)
class Augment:
    """Crops, resizes to `img_size` and flips; then applies a policy and erasing (MAE's order in fine-tuning).

    Attributes:
        img_size: (H, W) of the result.
        crop: "none" takes the largest centered box of the result's aspect ratio. "pad" shifts the image by up to
            `pad_px` (Krizhevsky 2009's CIFAR augmentation, as in ResNet Sec. 4.2). "random_resized" takes a box of
            random area and aspect ratio (MAE Sec. A.1), drawn as in torchvision.
        pad_px: largest shift of "pad", in pixels.
        scale: lowest and highest share of the image's area, for "random_resized".
        ratio: lowest and highest width over height, for "random_resized".
        flip: mirror each image with probability 0.5.
        policy: changes pixels after the crop; None for no policy.
        erasing: probability that an image gets a box of random bytes, 0 to 1.
        fill: color (one value per channel) of pixels that a policy moves in from outside; None for black.
        bands: what raw values mean.
        interpolation: resizes images, antialiased.
    """

    img_size: tuple[int, int]
    crop: Literal["none", "pad", "random_resized"] = "none"
    pad_px: int = 0
    scale: tuple[float, float] = (1.0, 1.0)
    ratio: tuple[float, float] = (1.0, 1.0)
    flip: bool = False
    policy: Policy | BatchPolicy | None = None
    erasing: float = 0.0
    fill: tuple[int, ...] | None = None
    bands: Bands = RGB8
    interpolation: Interpolation = "bicubic"

    def draw(self, seed: int, epoch: int, index: np.ndarray) -> AugmentParams:
        """Draws the augmentation of a batch; `index` int64 (B,) has the key of each image's draws."""
        keys, flips = ViewKeys(seed, epoch, index), np.zeros(len(index), bool)
        if self.flip:
            flips = (keys.random_uint32(RngStream.FLIP, 1)[:, 0] & 1).astype(bool)
        calls = None
        if self.policy is not None:
            draw = self.policy.draw_batch if isinstance(self.policy, BatchPolicy) else self.policy.draw
            calls = draw(keys)
        erasing = draw_erasing(self.erasing, self.img_size, keys) if self.erasing else None
        return AugmentParams(flips, self._draw_crops(keys), calls, erasing)

    def _draw_crops(self, keys: ViewKeys) -> np.ndarray | None:
        if self.crop == "none":
            return None
        if self.crop == "pad":
            drawn = keys.random_uint32(RngStream.CROP, 2).astype(np.uint64)
            shifts: np.ndarray = (drawn * np.uint64(2 * self.pad_px + 1)) >> np.uint64(32)
            return shifts.astype(np.int64) - self.pad_px
        numbers = keys.uniform(RngStream.CROP, 2 * _TRIES + 2)
        areas, ratios = numbers[:, :_TRIES], numbers[:, _TRIES : 2 * _TRIES]
        low, high = np.log(self.ratio[0]), np.log(self.ratio[1])
        ratios[:] = np.exp(low + ratios * (high - low))
        areas[:] = self.scale[0] + areas * (self.scale[1] - self.scale[0])
        return numbers

    def boxes(
        self, drawn: AugmentParams, sizes: npt.ArrayLike, positions: slice | list[int] = slice(None)
    ) -> np.ndarray:
        """Returns the boxes to cut out of the images at `positions` of a batch: int64 (n, 4).

        `sizes` (n, 2) has each image's height and width in pixels, or (2,) those of all.
        """
        size = np.broadcast_to(sizes, (len(drawn.flips[positions]), 2))
        if drawn.crops is None:
            return center_boxes(size, self.img_size)
        crops = drawn.crops[positions]
        if self.crop == "pad":
            return np.concatenate([crops, size], axis=1)
        areas, ratios = crops[:, :_TRIES], crops[:, _TRIES : 2 * _TRIES]
        pixels = size.prod(axis=1, keepdims=True) * areas
        tried = np.rint(np.sqrt(np.stack([pixels / ratios, pixels * ratios], axis=2)))
        fits = ((tried > 0) & (tried <= size[:, None])).all(axis=2)
        sides = tried[np.arange(len(tried)), fits.argmax(axis=1)]
        corners = np.floor(crops[:, -2:] * (size - sides + 1))
        found = np.concatenate([corners, sides], axis=1).astype(np.int64)
        for number in np.flatnonzero(~fits.any(axis=1)):
            found[number] = _fallback_box(size[number], self.ratio)
        return found

    def crop_resize_flip(self, image: np.ndarray, box: Box, flip: bool) -> np.ndarray:
        """Crops `box` out of (C, H, W), uint8 or raw values of `bands`; returns (C, *img_size) of the same type."""
        top, left, height, width = box
        if self.crop == "pad":
            top, left, (height, width) = top + self.pad_px, left + self.pad_px, self.img_size
            cut = self._padded(image)[:, top : top + height, left : left + width]
        else:
            cut = image[:, top : top + height, left : left + width]
            if cut.shape[1:] != self.img_size:
                if not self.bands.eight_bit:
                    return resize_bands(cut, self.img_size, self.bands.nodata, flip=flip)
                cut = _resize(cut, self.img_size, self.interpolation)
        return cut[..., ::-1] if flip else cut

    def apply(self, images: Sequence[np.ndarray] | np.ndarray, drawn: AugmentParams) -> np.ndarray:
        """Augments images of any sizes: (C, H, W) each -> (B, C, *img_size)."""
        whole = self.crop != "random_resized"
        if whole and isinstance(images, np.ndarray) and images.shape[2:] == self.img_size:  # as one array
            out: np.ndarray = images.copy() if drawn.crops is None else self._shift(images, drawn.crops)
            out[drawn.flips] = out[drawn.flips][..., ::-1]
        else:
            out = np.empty((len(images), len(images[0]), *self.img_size), images[0].dtype)
            boxes = self.boxes(drawn, [image.shape[1:] for image in images]).tolist()
            for number, (image, box) in enumerate(zip(images, boxes, strict=True)):
                out[number] = self.crop_resize_flip(image, box, bool(drawn.flips[number]))
        self.apply_policy_and_erasing(out, drawn)
        return out

    def apply_policy_and_erasing(self, images: np.ndarray, drawn: AugmentParams) -> None:
        """Applies policy and erasing in place to images (B, C, *img_size), uint8 or raw values of `bands`."""
        if isinstance(self.policy, BatchPolicy):
            together = max(1, _TOGETHER // images[0].size)
            for first in range(0, len(images), together):
                part = slice(first, first + together)
                calls = torch.from_numpy(drawn.calls[part])
                images[part] = self.policy.apply_batch(torch.from_numpy(images[part]), calls).numpy()
        elif self.policy is not None and drawn.calls is not None:
            for number, calls in enumerate(drawn.calls):
                if calls:
                    images[number] = self.policy.apply(images[number], calls, self.fill)
        if drawn.erasing is not None:
            drawn.erasing.fill(images, self.bands)

    def _shift(self, images: np.ndarray, shifts: np.ndarray) -> np.ndarray:
        """Moves images (B, C, *img_size) by shifts int64 (B, 2), down and right if negative."""
        windows = np.lib.stride_tricks.sliding_window_view(self._padded(images), self.img_size, axis=(2, 3))
        rows, columns = (shifts + self.pad_px).T
        shifted: np.ndarray = windows[np.arange(len(images)), :, rows, columns]
        return shifted

    def _padded(self, images: np.ndarray) -> np.ndarray:
        """Returns images (..., C, *img_size) with a border of `pad_px` pixels."""
        pad, (height, width) = self.pad_px, self.img_size
        padded = np.zeros((*images.shape[:-2], height + 2 * pad, width + 2 * pad), images.dtype)
        if not self.bands.eight_bit:
            bands = self.bands
            # Missing if the bands can mark that, else 0 in unit scale.
            missing = np.nan if bands.nodata is None and images.dtype.kind == "f" else bands.nodata
            border = np.array(bands.low if missing is None else [missing] * len(bands.low), np.float64)
            padded[:] = to_type(border, images.dtype).reshape(-1, 1, 1)
        padded[..., pad : pad + height, pad : pad + width] = images
        return padded


def _resize(image: np.ndarray, img_size: tuple[int, int], interpolation: Interpolation) -> np.ndarray:
    """Resizes a uint8 image by antialiased interpolation; bicubic is within 0.03 of 255 of PIL's resize.

    The memory layout of `image` may be planes or interleaved channels.
    """
    if image.strides[0] != 1 or not image.flags.writeable:
        # NumPy copies row by row; torch would copy such an image pixel by pixel.
        image = np.array(image, order="C")
    pixels = torch.from_numpy(image)[None]
    return F.interpolate(pixels, img_size, mode=interpolation, antialias=True)[0].numpy()


def center_crop(
    image: np.ndarray,
    img_size: tuple[int, int],
    bands: Bands = RGB8,
    interpolation: Interpolation = "bicubic",
) -> np.ndarray:
    """Crops the largest centered box of the result's aspect ratio and resizes it. Evaluation uses this view.

    It takes (C, H, W), uint8 or raw values of `bands`, and returns (C, *img_size) of the same type, contiguous.
    """
    (box,) = center_boxes(np.array([image.shape[1:]]), img_size).tolist()
    augment = Augment(img_size=img_size, bands=bands, interpolation=interpolation)
    return np.ascontiguousarray(augment.crop_resize_flip(image, box, flip=False))


def center_boxes(sizes: np.ndarray, img_size: tuple[int, int]) -> np.ndarray:
    """Returns the largest centered boxes (n, 4) with the aspect ratio of `img_size` in images of `sizes` (n, 2)."""
    scale = (sizes / np.array(img_size)).min(axis=1, keepdims=True)
    sides = np.clip(np.rint(scale * np.array(img_size)).astype(np.int64), 1, sizes)
    return np.concatenate([(sizes - sides) // 2, sides], axis=1)


def _fallback_box(size: np.ndarray, ratio: tuple[float, float]) -> Box:
    """Returns the largest centered box with an aspect ratio within `ratio`, as torchvision does."""
    height, width = size.tolist()
    if width / height < ratio[0]:
        height = min(max(round(width / ratio[0]), 1), height)
    elif width / height > ratio[1]:
        width = min(max(round(height * ratio[1]), 1), width)
    return int(size[0] - height) // 2, int(size[1] - width) // 2, height, width


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


@dataclass(frozen=True)
class Erasing:
    """The erased boxes of a batch (Zhong et al., "Random Erasing Data Augmentation", arXiv 1708.04896, Sec. 3).

    `boxes` int64 (B, 4) are top, left, height, width in pixels; height 0 erases nothing. `key` and the sample indices
    `index` (B,) are those of the random bytes.
    """

    boxes: np.ndarray
    key: tuple[int, int]
    index: np.ndarray

    def fill(self, images: np.ndarray, bands: Bands = RGB8) -> None:
        """Fills the boxes of images (B, C, H, W) in place with random bytes, independent for each pixel and channel.

        The bytes 0..255 are spread over the scale of `bands`. This is the paper's fill. It departs from timm's "pixel"
        mode, which MAE chose: that mode draws normal noise after normalization, which uint8 cannot hold.
        """
        rows = np.flatnonzero(self.boxes[:, 2])
        if not len(rows):
            return
        # One call of the hash draws all bytes.
        counts = images.shape[1] * self.boxes[rows, 2] * self.boxes[rows, 3]
        blocks = -(-counts // _BLOCK_BYTES)
        starts = np.cumsum(blocks) - blocks
        # Counters begin at 0 in each image, so its bytes do not depend on the rest of the batch.
        counter = np.arange(blocks.sum()) - np.repeat(starts, blocks)
        samples = np.repeat(self.index[rows], blocks)
        drawn = threefry2x32(self.key, samples.astype(np.uint32), counter.astype(np.uint32))
        # "<u4": the same order of bytes on all machines.
        noise = np.stack(drawn, axis=1).astype("<u4").view(np.uint8).reshape(-1)
        for row, start, count in zip(rows, starts * _BLOCK_BYTES, counts, strict=True):
            top, left, height, width = self.boxes[row]
            values = noise[start : start + count].reshape(-1, height, width)
            if not bands.eight_bit:
                low, high = (np.array(ends).reshape(-1, 1, 1) for ends in (bands.low, bands.high))
                values = to_type(low + values * ((high - low) / 255), images.dtype)
            images[row, :, top : top + height, left : left + width] = values


def draw_erasing(share: float, img_size: tuple[int, int], keys: ViewKeys) -> Erasing:
    """Draws which share of the images is erased, and where.

    It takes the first of ten boxes that fits, as timm does; the paper tries until one fits.
    """
    numbers = keys.uniform(RngStream.ERASE, 1 + 2 * _TRIES + 2)
    size = np.array(img_size)
    area = (_AREA[0] + numbers[:, 1 : 1 + _TRIES] * (_AREA[1] - _AREA[0])) * size.prod()
    ratio = np.exp((1 - 2 * numbers[:, 1 + _TRIES : 1 + 2 * _TRIES]) * np.log(_RATIO))
    tried = np.rint(np.sqrt(np.stack([area * ratio, area / ratio], axis=2))).astype(np.int64)
    fits = (tried < size).all(axis=2)
    box = tried[np.arange(len(tried)), fits.argmax(axis=1)]
    # A side of 0 pixels erases nothing.
    erased = (numbers[:, 0] < share) & fits.any(axis=1) & (box > 0).all(axis=1)
    corner = np.floor(numbers[:, -2:] * (size - box + 1)).astype(np.int64)
    boxes = np.where(erased[:, None], np.concatenate([corner, box], axis=1), 0)
    return Erasing(boxes, derive_key(keys.seed, RngStream.ERASE_NOISE, keys.epoch), keys.index)
