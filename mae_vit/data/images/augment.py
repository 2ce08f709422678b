"""Keyed crops, flips, policies and erasing: a sample gets the same view on every rank and worker.

Boxes are computed from the hash in float64 on the CPU, because logarithms and roots differ
between devices. They are drawn for a whole batch at once, because a hash in NumPy costs time per
call, not per number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import torch
import torch.nn.functional as F

from mae_vit.core.bands import Bands
from mae_vit.core.keyed_rng import RngStream, derive_key, random_uint32, uniform
from mae_vit.data.images.bands.resize import resize_bands
from mae_vit.data.images.random_erasing import Erasing, draw_erasing

# torchvision's RandomResizedCrop tries ten boxes before it falls back.
_TRIES = 10

Interpolation = Literal["bicubic", "bilinear"]


class Policy(Protocol):
    """Changes pixels and keeps the image's size (`mae_vit.data.images.auto_augment`)."""

    @property
    def name(self) -> str:
        """The value of `data.augment.policy`."""

    def draw(self, seed: int, epoch: int, index: np.ndarray) -> Sequence[Any]:
        """Draws the change of each sample in `index` (B,); a false value means no change."""

    def apply(self, image: np.ndarray, calls: Any, fill: tuple[int, ...] | None) -> np.ndarray:
        """Returns the changed image, uint8 (C, H, W)."""


@dataclass(frozen=True)
class AugmentParams:
    """The drawn augmentation of a batch.

    Attributes:
        boxes: int64 (B, 4): top, left, height, width in pixels. Top and left may be
            negative; zeros fill the part outside the image.
        flips: bool (B,), which images are mirrored.
        calls: each image's change by the policy; None without a policy.
        erasing: the erased boxes; None without erasing.
    """

    boxes: np.ndarray
    flips: np.ndarray
    calls: Sequence[Any] | None = None
    erasing: Erasing | None = None


@dataclass(frozen=True)
class Augment:
    """Crops, resizes to `img_size` and flips; then applies a policy and erasing (MAE's order in fine-tuning).

    Attributes:
        img_size: (H, W) of the result.
        crop: "none" takes the largest centered box of the result's aspect ratio.
            "pad" shifts the image by up to `pad_px` (Krizhevsky 2009's CIFAR augmentation as
            ResNet Sec. 4.2 uses it). "random_resized" takes a box of random area and aspect
            ratio (MAE Sec. A.1), drawn as torchvision draws it.
        pad_px: largest shift of "pad", in pixels.
        scale: lowest and highest share of the image's area, for "random_resized".
        ratio: lowest and highest width over height, for "random_resized".
        flip: mirror each image with probability 0.5.
        policy: changes pixels after the crop; None for no policy.
        erasing: probability that an image gets a box of random bytes, 0 to 1.
        fill: color (one value per channel) of pixels that a policy moves in from outside; None for black.
        bands: what raw values mean; None for 8-bit gray or RGB.
        interpolation: resizes images, antialiased.
    """

    img_size: tuple[int, int]
    crop: Literal["none", "pad", "random_resized"] = "none"
    pad_px: int = 0
    scale: tuple[float, float] = (1.0, 1.0)
    ratio: tuple[float, float] = (1.0, 1.0)
    flip: bool = False
    policy: Policy | None = None
    erasing: float = 0.0
    fill: tuple[int, ...] | None = None
    bands: Bands | None = None
    interpolation: Interpolation = "bicubic"

    def draw(self, seed: int, epoch: int, index: np.ndarray, sizes: np.ndarray) -> AugmentParams:
        """Draws the augmentation of a batch.

        Args:
            seed: the run's seed.
            epoch: from 0.
            index: int64 (B,), the key of each image's draws.
            sizes: int64 (B, 2), height and width of each image in pixels.
        """
        flips = np.zeros(len(index), bool)
        if self.flip:
            flips = (random_uint32(derive_key(seed, RngStream.FLIP, epoch), index, 1)[0][:, 0] & 1).astype(
                bool
            )
        return AugmentParams(
            self._draw_boxes(seed, epoch, index, sizes),
            flips,
            self.policy.draw(seed, epoch, index) if self.policy else None,
            draw_erasing(self.erasing, self.img_size, seed, epoch, index) if self.erasing else None,
        )

    def _draw_boxes(self, seed: int, epoch: int, index: np.ndarray, sizes: np.ndarray) -> np.ndarray:
        if self.crop == "none":
            return _center_boxes(sizes, self.img_size)
        key = derive_key(seed, RngStream.CROP, epoch)
        if self.crop == "pad":
            drawn = random_uint32(key, index, 2)[0].astype(np.uint64)
            shifts = ((drawn * np.uint64(2 * self.pad_px + 1)) >> np.uint64(32)).astype(
                np.int64
            ) - self.pad_px
            return np.concatenate([shifts, sizes], axis=1)
        return self._random_boxes(uniform(key, index, 2 * _TRIES + 2), sizes)

    def _random_boxes(self, numbers: np.ndarray, sizes: np.ndarray) -> np.ndarray:
        """Returns boxes (B, 4) of random area and aspect ratio: the first of ten tries that fits."""
        height, width = sizes[:, :1].astype(np.float64), sizes[:, 1:].astype(np.float64)
        area = height * width * (self.scale[0] + numbers[:, :_TRIES] * (self.scale[1] - self.scale[0]))
        low, high = np.log(self.ratio[0]), np.log(self.ratio[1])
        ratio = np.exp(low + numbers[:, _TRIES : 2 * _TRIES] * (high - low))
        widths = np.rint(np.sqrt(area * ratio))
        heights = np.rint(np.sqrt(area / ratio))
        fits = (widths > 0) & (widths <= width) & (heights > 0) & (heights <= height)
        first = fits.argmax(axis=1)
        rows = np.arange(len(sizes))
        box = np.stack([heights[rows, first], widths[rows, first]], axis=1).astype(np.int64)
        room = sizes - box + 1
        corner = np.floor(numbers[:, 2 * _TRIES :] * room).astype(np.int64)
        boxes = np.concatenate([corner, box], axis=1)
        none = ~fits.any(axis=1)
        boxes[none] = _fallback_boxes(sizes[none], self.ratio)
        return boxes

    def crop_resize_flip(self, image: np.ndarray, box: np.ndarray, flip: bool) -> np.ndarray:
        """Crops, resizes and flips one image.

        Args:
            image: (C, H, W), uint8 or raw values of `bands`.
            box: int64 (4,): top, left, height, width in pixels.
            flip: mirror it.

        Returns:
            (C, *img_size) of the same type.

        Raises:
            ValueError: if `crop` is "pad" and the image's size is not `img_size`.
        """
        if self.crop == "pad":
            cut = self._shift(image[None], box[None])[0]
        else:
            top, left, height, width = box.tolist()
            cut = image[:, top : top + height, left : left + width]
            if cut.shape[1:] != self.img_size:
                if self.bands is not None and not self.bands.eight_bit:
                    return resize_bands(cut, self.img_size, self.bands.nodata, flip=bool(flip))
                cut = _resize(cut, self.img_size, self.interpolation)
        return cut[..., ::-1] if flip else cut

    def apply(self, images: Sequence[np.ndarray], drawn: AugmentParams) -> np.ndarray:
        """Augments images of any sizes, one by one: (C, H, W) each -> (B, C, *img_size)."""
        out = np.empty((len(images), len(images[0]), *self.img_size), images[0].dtype)
        for number, (image, box, flip) in enumerate(zip(images, drawn.boxes, drawn.flips, strict=True)):
            out[number] = self.crop_resize_flip(image, box, flip)
        self.apply_policy_and_erasing(out, drawn)
        return out

    def apply_batch(self, images: np.ndarray, drawn: AugmentParams) -> np.ndarray:
        """Augments equal-size images: (B, C, H, W) -> (B, C, *img_size)."""
        equal = images.shape[2:] == self.img_size
        if self.crop == "random_resized" or not equal:
            return self.apply(list(images), drawn)
        views = self._shift(images, drawn.boxes) if self.crop == "pad" else images.copy()
        views[drawn.flips] = views[drawn.flips][..., ::-1]
        self.apply_policy_and_erasing(views, drawn)
        return views

    def apply_policy_and_erasing(self, images: np.ndarray, drawn: AugmentParams) -> None:
        """Applies policy and erasing in place.

        Args:
            images: (B, C, *img_size), uint8 or raw values of `bands`.
            drawn: from `draw`.
        """
        if self.policy is not None and drawn.calls is not None:
            for number, calls in enumerate(drawn.calls):
                if calls:
                    images[number] = self.policy.apply(images[number], calls, self.fill)
        if drawn.erasing is not None:
            drawn.erasing.fill(images, self.bands)

    def _shift(self, images: np.ndarray, boxes: np.ndarray) -> np.ndarray:
        if images.shape[2:] != self.img_size:
            raise ValueError(
                f'data.augment.crop="pad" needs images of {self.img_size}, not {images.shape[2:]}: '
                'use "random_resized", or prepare the data with that size'
            )
        pad, (height, width) = self.pad_px, self.img_size
        padded = np.zeros((*images.shape[:2], height + 2 * pad, width + 2 * pad), images.dtype)
        if self.bands is not None and not self.bands.eight_bit:
            padded[:] = _border(self.bands)
        padded[:, :, pad : pad + height, pad : pad + width] = images
        windows = np.lib.stride_tricks.sliding_window_view(padded, self.img_size, axis=(2, 3))
        shifted: np.ndarray = windows[np.arange(len(images)), :, boxes[:, 0] + pad, boxes[:, 1] + pad]
        return shifted


def _border(bands: Bands) -> np.ndarray:
    """Returns the raw value outside of images, (C, 1, 1): missing where values can be, else what is 0 in unit scale."""
    missing = np.nan if bands.dtype.startswith("float") else None
    value = missing if bands.nodata is None else bands.nodata
    values = np.array(bands.low if value is None else [value] * len(bands.names))
    if not bands.dtype.startswith("float"):
        limits = np.iinfo(bands.dtype)
        values = np.clip(np.rint(values), limits.min, limits.max)
    return values.astype(bands.dtype).reshape(-1, 1, 1)


def _resize(image: np.ndarray, img_size: tuple[int, int], interpolation: Interpolation) -> np.ndarray:
    """Resizes a uint8 image by antialiased interpolation; bicubic is within 0.03 of 255 of PIL's resize.

    The memory layout of `image` may be planes or interleaved channels.
    """
    if image.strides[0] != 1 or not image.flags.writeable:
        # Copy here, which goes row by row; torch would copy such an image pixel by pixel.
        image = np.ascontiguousarray(image)
    pixels = torch.from_numpy(image)[None]
    return F.interpolate(pixels, img_size, mode=interpolation, antialias=True)[0].numpy()


def center_crop(
    image: np.ndarray,
    img_size: tuple[int, int],
    bands: Bands | None = None,
    interpolation: Interpolation = "bicubic",
) -> np.ndarray:
    """Crops the largest centered box of the result's aspect ratio and resizes it. Evaluation uses this view.

    Args:
        image: (C, H, W), uint8 or raw values of `bands`.
        img_size: (H, W) of the result.
        bands: what raw values mean; None for 8-bit gray or RGB.
        interpolation: resizes the box.

    Returns:
        (C, *img_size) of the same type, contiguous.
    """
    box = _center_boxes(np.array([image.shape[1:]], np.int64), img_size)[0]
    augment = Augment(img_size=img_size, bands=bands, interpolation=interpolation)
    return np.ascontiguousarray(augment.crop_resize_flip(image, box, flip=False))


def _center_boxes(sizes: np.ndarray, img_size: tuple[int, int]) -> np.ndarray:
    """Returns the largest centered boxes (B, 4) with the aspect ratio of `img_size`."""
    scale = np.minimum(sizes[:, 0] / img_size[0], sizes[:, 1] / img_size[1])[:, None]
    box = np.maximum(np.rint(scale * np.array(img_size)), 1).astype(np.int64)
    box = np.minimum(box, sizes)
    return np.concatenate([(sizes - box) // 2, box], axis=1)


def _fallback_boxes(sizes: np.ndarray, ratio: tuple[float, float]) -> np.ndarray:
    """Returns the largest centered boxes (B, 4) with an aspect ratio within `ratio`, as torchvision does."""
    box = sizes.copy()
    shape = sizes[:, 1] / np.maximum(sizes[:, 0], 1)
    narrow, wide = shape < ratio[0], shape > ratio[1]
    box[narrow, 0] = np.maximum(np.rint(sizes[narrow, 1] / ratio[0]), 1)
    box[wide, 1] = np.maximum(np.rint(sizes[wide, 0] * ratio[1]), 1)
    box = np.minimum(box, sizes)
    return np.concatenate([(sizes - box) // 2, box], axis=1)
