"""The views of `Augment` for whole batches of small images, computed on the device that the images are on.

Every pixel equals that of `Augment.apply`, to the bit and on every device: all numbers are whole, or fractions
that float32 holds exactly.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from mae_vit.data.images.augment import Augment, AugmentParams, Interpolation

# Largest side of images: the weights of all crops of 128 px take 50 MB.
MOST_PX = 128
# torch's uint8 resize rounds its weights to 16 bits, with as many fractional bits as fit, 22 at most.
_WEIGHT_BITS, _MOST_FRACTION_BITS = 15, 22
# Whole numbers up to 2**24 are exact in float32.
_EXACT_BITS = 24


class BatchedCrop:
    """Crops uint8 images of one size, resizes and flips them.

    A crop is resized by two products with matrices of its weights, as torch does it on a CPU: columns first, rounded
    to whole values in between.
    """

    def __init__(
        self,
        size: tuple[int, int],
        img_size: tuple[int, int],
        interpolation: Interpolation,
        device: torch.device,
    ) -> None:
        """Computes the weights of all crops of images of `size` (H, W) on `device`."""
        self.img_size = img_size
        (height, width), (rows, columns) = size, img_size
        tall, wide = (_weights(old, new, interpolation) for old, new in ((height, rows), (width, columns)))
        exact = max(_bits(tall), _bits(wide)) <= _EXACT_BITS
        self._device, self._dtype = device, torch.float32 if exact else torch.float64
        self._tall = self._windows(tall)
        # The second half mirrors.
        self._wide = self._windows(np.concatenate([wide, wide[:, ::-1]]))

    def _windows(self, weights: np.ndarray) -> Tensor:
        """Returns the weights of boxes (lengths, new, old + 1, old): [length, :, old - first] of `first` and length."""
        old = weights.shape[2]
        padded = torch.from_numpy(np.pad(weights, ((0, 0), (0, 0), (old, 0))))
        return padded.to(self._device, self._dtype).unfold(2, old, 1)

    def __call__(self, images: Tensor, boxes: Tensor) -> Tensor:
        """Returns views uint8 (B, C, *img_size) of images (B, C, H, W) and their boxes and flips int64 (B, 5)."""
        count, channels, height, width = images.shape
        rows, columns = self.img_size
        top, left, tall, wide, flips = boxes.unbind(1)
        down = self._tall[tall, :, height - top]  # (B, rows, height)
        across = self._wide[wide + flips * (width + 1), :, width - left]  # (B, columns, width)
        # The order (B, H, C, W) makes each product one for all channels.
        pixels = images.permute(0, 2, 1, 3).to(self._dtype, memory_format=torch.contiguous_format)
        pixels = torch.bmm(pixels.view(count, height * channels, width), across.transpose(1, 2))
        pixels.add_(0.5).clamp_(0, 255).floor_()
        pixels = torch.bmm(down, pixels.view(count, height, channels * columns))
        pixels.add_(0.5).clamp_(0, 255)  # to uint8 rounds down
        pixels = pixels.view(count, rows, channels, columns).permute(0, 2, 1, 3)
        return pixels.to(torch.uint8, memory_format=torch.contiguous_format)


def shift(images: Tensor, boxes: Tensor) -> Tensor:
    """Cuts boxes of the images' size out of images (B, C, H, W) and flips them; zeros fill the part outside.

    `boxes` is int64 (B, 5): top, left, height, width, flip.
    """
    count, channels, height, width = images.shape
    top, left, _, _, flips = boxes.unbind(1)
    rows, columns = (torch.arange(size, device=images.device)[None] for size in (height, width))
    columns = torch.where(flips[:, None] > 0, width - 1 - columns, columns) + left[:, None]
    rows = rows + top[:, None]
    inside = ((rows >= 0) & (rows < height))[:, :, None] & ((columns >= 0) & (columns < width))[:, None]
    batch, channel = (torch.arange(size, device=images.device) for size in (count, channels))
    cut = images[
        batch[:, None, None, None],
        channel[:, None, None],
        rows.clamp_(0, height - 1)[:, None, :, None],
        columns.clamp_(0, width - 1)[:, None, None, :],
    ]
    return cut.mul_(inside[:, None])


# Not in the sources: data workers get pickled copies of those.
cached_crop = lru_cache(maxsize=4)(BatchedCrop)


def resizes(augment: Augment, size: tuple[int, int]) -> bool:
    """Whether views of images of `size` (H, W) are resized."""
    return augment.crop == "random_resized" or size != augment.img_size


def boxes_and_flips(augment: Augment, drawn: AugmentParams, size: tuple[int, int]) -> np.ndarray:
    """Returns top, left, height, width and flip of each image of a batch: int64 (B, 5)."""
    return np.concatenate([augment.boxes(drawn, size), drawn.flips[:, None]], axis=1)


def _weights(old: int, new: int, interpolation: Interpolation) -> np.ndarray:
    """Returns the weights that torch's antialiased uint8 resize has on a CPU, for each length up to `old`.

    Float64 (old + 1, new, old): those of the pixels from a crop's first on; 0 beyond its length. As in ATen's
    native/cpu/UpSampleKernel.cpp, `compute_index_ranges_int16_weights`.
    """
    weights = np.zeros((old + 1, new, old))
    for length in range(1, old + 1):
        scale, places = length / new, np.arange(length)
        spread = max(scale, 1.0)
        support = (2.0 if interpolation == "bicubic" else 1.0) * spread
        center = scale * (np.arange(new)[:, None] + 0.5)
        first = np.maximum((center - support + 0.5).astype(np.int64), 0)
        last = np.minimum((center + support + 0.5).astype(np.int64), length)
        distance = np.abs((places - center + 0.5) * (1 / spread))
        exact = np.where((places >= first) & (places < last), _filter(distance, interpolation), 0)
        exact /= np.cumsum(exact, axis=1)[:, -1:]  # in torch's order
        bits = 0
        while bits < _MOST_FRACTION_BITS and int(0.5 + exact.max() * 2 ** (bits + 1)) < 2**_WEIGHT_BITS:
            bits += 1
        whole = np.trunc(exact * 2**bits + np.copysign(0.5, exact))
        weights[length, :, :length] = whole / 2**bits
    return weights


def _filter(distance: np.ndarray, interpolation: Interpolation) -> np.ndarray:
    """Returns the weights of distances in pixels: Keys' cubic with a = -0.5, as Pillow's, or a triangle."""
    if interpolation == "bilinear":
        return np.maximum(1 - distance, 0)
    a = -0.5
    near = ((a + 2) * distance - (a + 3)) * distance * distance + 1
    far = (((distance - 5) * distance + 8) * distance - 4) * a
    return np.where(distance < 1, near, np.where(distance < 2, far, 0))


def _bits(weights: np.ndarray) -> int:
    """Returns the most bits that a sum of weighted bytes takes."""
    most = 0
    for whole in weights[1:]:
        fraction = next(bits for bits in range(_MOST_FRACTION_BITS + 1) if not (whole * 2**bits % 1).any())
        most = max(most, int((np.abs(whole).sum(axis=1).max() * 255 + 0.5) * 2**fraction).bit_length())
    return most
