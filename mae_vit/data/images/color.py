"""Keyed color jitter for contrastive methods: brightness, contrast, saturation, hue and gray."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from mae_vit.core.keyed_rng import RngStream, ViewKeys

# ITU-R BT.601: the weights with which Pillow turns RGB into gray.
_LUMA = np.array([0.299, 0.587, 0.114])
# RGB to YIQ (FCC 1953): one row of luma, two rows of color. Rotating the two color rows changes only the hue.
_YIQ = np.array([_LUMA, [0.595716, -0.274453, -0.321263], [0.211456, -0.522591, 0.311135]])
# A rotation of the color circle on RGB: the first, plus cosine times the second, plus sine times the third.
_TURN = [
    np.linalg.inv(_YIQ) @ np.array(turn) @ _YIQ
    for turn in (
        [[1, 0, 0], [0, 0, 0], [0, 0, 0]],
        [[0, 0, 0], [0, 1, 0], [0, 0, 1]],
        [[0, 0, 0], [0, 0, -1], [0, 1, 0]],
    )
]
# Fractional bits of the coefficients. Integer arithmetic gives the same pixels on all processors.
_BITS = 12


@dataclass(frozen=True)
class ColorJitter:
    """The color changes of SimCLR (arXiv 2002.05709, App. A). Every image gets all of them, in one fixed order.

    It departs from torchvision's `ColorJitter` to be exact and fast: it goes brightness, contrast, saturation, hue;
    hue rotates in YIQ, not HSV; values are clipped once, at the end. So all changes are one affine map per pixel.

    Attributes:
        brightness: the factor is drawn from 1 - brightness to 1 + brightness.
        contrast: the factor is drawn likewise; the image's mean gray value stays.
        saturation: the factor is drawn likewise; each pixel's gray value stays.
        hue: largest rotation as a share of the color circle, 0 to 0.5.
        gray: probability that an image loses its color, 0 to 1.
    """

    name: ClassVar[str] = "color"

    brightness: float = 0.4
    contrast: float = 0.4
    saturation: float = 0.4
    hue: float = 0.1
    gray: float = 0.2

    def draw_batch(self, keys: ViewKeys) -> np.ndarray:
        """Draws the changes of views as the whole numbers that `apply_batch` takes: int64 (B, K)."""
        drawn = keys.uniform(RngStream.POLICY, 5).T
        ranges = np.array([[self.brightness], [self.contrast], [self.saturation], [2 * math.pi * self.hue]])
        moved = (2 * drawn[:4] - 1) * ranges
        moved[:3] += 1
        return coefficients_of(np.concatenate([moved, drawn[4:] < self.gray]))

    def apply_batch(self, images: Tensor, coefficients: Tensor) -> Tensor:
        """Changes uint8 (B, C, H, W) by whole numbers (B, K) on the same device; equal on all devices.

        With one channel only brightness and contrast apply.
        """
        count, channels, height, width = images.shape
        scale, pull, mix, luma = coefficients.split((1, 1, 9, 3), dim=1)
        if channels == 1:
            mix = luma = torch.full_like(scale, 1 << _BITS)
        mix = mix.to(torch.int32).reshape(count, channels, channels, 1, 1)
        # The mean gray value, with `_BITS` fractional bits.
        sums = images.sum(dim=(2, 3), dtype=torch.int64)
        mean = (sums * luma).sum(dim=1, keepdim=True) // (height * width)
        offset = (mean * pull) >> _BITS
        pixels = images.to(torch.int32)
        pixels *= scale.to(torch.int32).view(-1, 1, 1, 1)
        pixels += offset.to(torch.int32).view(-1, 1, 1, 1)
        pixels >>= _BITS - 4  # 4 fractional bits are left
        out = torch.mul(mix[:, :, 0], pixels[:, :1], out=torch.empty_like(pixels))
        for channel in range(1, channels):
            out.addcmul_(mix[:, :, channel], pixels[:, channel : channel + 1])
        out += 1 << (_BITS + 3)
        out >>= _BITS + 4
        return out.clamp_(0, 255).to(torch.uint8)


def coefficients_of(changes: np.ndarray) -> np.ndarray:
    """Returns whole numbers of changes: int64 (B, 14).

    They are the factor, the pull to the mean, the map of colors in rows, and the weights of the gray value. `changes`
    float64 (5, B) are the factors of brightness, contrast and saturation, the angle of hue (radians), and 1 for gray.
    """
    brightness, contrast, saturation, angle, gray = changes
    # The last bits of sines differ between processors; they are rounded away below.
    turn = _TURN[0][..., None] + _TURN[1][..., None] * np.cos(angle) + _TURN[2][..., None] * np.sin(angle)
    luma = np.broadcast_to(_LUMA[:, None], (3, len(gray)))
    # Each row of the turn sums to 1: a gray value stays.
    maps = np.where(gray > 0, luma, saturation * turn + (1 - saturation) * luma)
    factors = np.stack([contrast * brightness, (1 - contrast) * brightness])
    numbers = np.concatenate([factors, maps.reshape(9, -1), luma])
    return np.rint(numbers * (1 << _BITS)).astype(np.int64).T
