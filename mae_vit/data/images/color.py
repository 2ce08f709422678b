"""Keyed color jitter for contrastive methods: brightness, contrast, saturation, hue and gray."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np

from mae_vit.core.keyed_rng import RngStream, derive_key, uniform

# ITU-R BT.601: the weights with which Pillow turns RGB into gray.
_LUMA = np.array([0.299, 0.587, 0.114])
# RGB to YIQ (FCC 1953): one row of luma, two rows of color. Rotating the two color rows changes only the hue.
_YIQ = np.array([_LUMA, [0.595716, -0.274453, -0.321263], [0.211456, -0.522591, 0.311135]])
# Fractional bits of the coefficients. Integer arithmetic gives the same pixels on all processors.
_BITS = 12


class Change(NamedTuple):
    """The color change of one image. Factors of 1 and an angle of 0 (radians) change nothing."""

    brightness: float
    contrast: float
    saturation: float
    angle: float
    gray: bool


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

    def draw(self, seed: int, epoch: int, index: np.ndarray) -> list[Change]:
        """Draws the change of each sample of `index` (B,)."""
        drawn = uniform(derive_key(seed, RngStream.POLICY, epoch), index, 5)
        ranges = np.array([self.brightness, self.contrast, self.saturation, 2 * math.pi * self.hue])
        moved = (2 * drawn[:, :4] - 1) * ranges
        moved[:, :3] += 1
        grays = drawn[:, 4] < self.gray
        return [Change(*drawn_one) for drawn_one in zip(*moved.T.tolist(), grays.tolist(), strict=True)]

    def apply(self, image: np.ndarray, calls: Change, fill: tuple[int, ...] | None) -> np.ndarray:
        """Changes uint8 (C, H, W); with one channel only brightness and contrast apply. No pixel needs the `fill`."""
        mix = _fixed(np.ones((1, 1)) if len(image) == 1 else _color_map(calls))
        luma = _fixed(np.ones(1) if len(image) == 1 else _LUMA)
        pixels = image.astype(np.int32)
        scale = _fixed(calls.contrast * calls.brightness)
        # The mean gray value, with `_BITS` fractional bits.
        mean = int((pixels.sum(axis=(1, 2), dtype=np.int64) * luma).sum()) // pixels[0].size
        offset = mean * int(_fixed((1 - calls.contrast) * calls.brightness)) >> _BITS
        pixels = ((pixels * scale) + offset) >> (_BITS - 4)  # 4 fractional bits are left
        out = np.empty_like(pixels)
        for channel, row in enumerate(mix):
            out[channel] = sum(int(weight) * plane for weight, plane in zip(row, pixels, strict=True))
        half = 1 << (_BITS + 3)
        changed: np.ndarray = np.clip((out + half) >> (_BITS + 4), 0, 255).astype(np.uint8)
        return changed


def _color_map(change: Change) -> np.ndarray:
    """Returns saturation and hue, or gray, as one matrix (3, 3) on RGB."""
    gray = np.tile(_LUMA, (3, 1))
    if change.gray:
        return gray
    cos, sin = math.cos(change.angle), math.sin(change.angle)
    turn = np.array([[1, 0, 0], [0, cos, -sin], [0, sin, cos]])
    saturate = change.saturation * np.eye(3) + (1 - change.saturation) * gray
    turned: np.ndarray = np.linalg.inv(_YIQ) @ turn @ _YIQ @ saturate
    return turned


def _fixed(number: np.ndarray | float) -> np.ndarray:
    """Rounds to `_BITS` fractional bits, int32."""
    return np.rint(np.asarray(number) * (1 << _BITS)).astype(np.int32)
