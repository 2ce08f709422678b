"""RandAugment and AutoAugment with keyed draws.

timm's functions change the pixels of PIL images. They depend only on their arguments, which this module draws by key.

`augment.py` uses the protocol `Policy` and does not import this module: without a policy, data workers skip timm.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
from PIL import Image
from timm.data.auto_augment import NAME_TO_OP, posterize, translate_x_abs, translate_y_abs
from torchvision.transforms import AutoAugment, AutoAugmentPolicy

from mae_vit.core.keyed_rng import RngStream, ViewKeys

# timm's levels go from 0 to 10.
_MAX_LEVEL = 10.0
# AutoAugment's magnitudes are ten bins, 0 to 9 (arXiv 1805.09501 Sec. 3.2).
_LAST_BIN = 9


class Call(NamedTuple):
    """One change of an image: the name of a function in `OPS` and its arguments."""

    op: str
    arguments: tuple[float, ...] = ()


class _Level(NamedTuple):
    """How an op uses its level: the map from level to argument, and whether the level gets a random sign."""

    argument: Callable[[float], float] | None = None
    signed: bool = False

    def call(self, op: str, level: float, sign: int) -> Call:
        if self.argument is None:
            return Call(op)
        return Call(op, (self.argument(sign * level if self.signed else level),))


def _translate_x(image: Image.Image, share: float, **how: Any) -> Image.Image:
    """Shifts to the right by a share of the width, in whole pixels as torchvision does (towards 0)."""
    return translate_x_abs(image, -int(share * image.size[0]), **how)


def _translate_y(image: Image.Image, share: float, **how: Any) -> Image.Image:
    """Shifts down by a share of the height, in whole pixels."""
    return translate_y_abs(image, -int(share * image.size[1]), **how)


def _posterize(image: Image.Image, bits: int, **how: Any) -> Image.Image:
    """Keeps the highest `bits` bits of each value. The highest level keeps 0 bits, which is black."""
    # Pillow 13 raises for 0 bits; earlier versions returned black.
    return posterize(image, bits, **how) if bits else Image.new(image.mode, image.size)


# timm's functions by timm's names. Our translations take a share of the image's size and shift by whole pixels.
OPS: dict[str, Callable[..., Image.Image]] = {
    **NAME_TO_OP,
    "PosterizeIncreasing": _posterize,
    "TranslateX": _translate_x,
    "TranslateY": _translate_y,
}


class _Policy:
    """Applies ops to PIL images."""

    name: ClassVar[str]
    resample: ClassVar[Image.Resampling]

    def apply(self, image: np.ndarray, calls: tuple[Call, ...], fill: tuple[int, ...] | None) -> np.ndarray:
        """Changes uint8 (C, H, W) with 1 or 3 channels; `fill` has the color of pixels that move in from outside."""
        gray = len(image) == 1
        picture = Image.fromarray(image[0] if gray else np.ascontiguousarray(image.transpose(1, 2, 0)))
        color = fill[0] if fill and gray else fill
        for op, arguments in calls:
            picture = OPS[op](picture, *arguments, fillcolor=color, resample=self.resample)
        changed = np.asarray(picture)
        return changed[None] if gray else changed.transpose(2, 0, 1)


def _enhance(level: float) -> float:
    # A factor of 1 changes nothing. 0 would leave a single color, so the minimum is 0.1.
    return max(0.1, 1.0 + level / _MAX_LEVEL * 0.9)


# timm's "increasing" ops (`inc1`): each becomes stronger with the level.
RANDAUGMENT: dict[str, _Level] = {
    "AutoContrast": _Level(),
    "Equalize": _Level(),
    "Invert": _Level(),
    "Rotate": _Level(lambda level: level / _MAX_LEVEL * 30.0, signed=True),
    "PosterizeIncreasing": _Level(lambda level: 4 - int(level / _MAX_LEVEL * 4)),
    "SolarizeIncreasing": _Level(lambda level: 256 - int(level / _MAX_LEVEL * 256)),
    "SolarizeAdd": _Level(lambda level: int(level / _MAX_LEVEL * 110)),
    "ColorIncreasing": _Level(_enhance, signed=True),
    "ContrastIncreasing": _Level(_enhance, signed=True),
    "BrightnessIncreasing": _Level(_enhance, signed=True),
    "SharpnessIncreasing": _Level(_enhance, signed=True),
    "ShearX": _Level(lambda level: level / _MAX_LEVEL * 0.3, signed=True),
    "ShearY": _Level(lambda level: level / _MAX_LEVEL * 0.3, signed=True),
    "TranslateXRel": _Level(lambda level: level / _MAX_LEVEL * 0.45, signed=True),
    "TranslateYRel": _Level(lambda level: level / _MAX_LEVEL * 0.45, signed=True),
}
# Probability that a drawn op is applied (timm's default, which MAE keeps).
_RANDAUGMENT_SHARE = 0.5
_RANDAUGMENT_DRAWS = 5  # which op, whether it is applied, its sign, and two for a normal number


@dataclass(frozen=True)
class RandAugment(_Policy):
    """RandAugment: ops are drawn with replacement, and their level has normal noise.

    RandAugment (arXiv 1909.13719) in the form of timm's `rand-m9-mstd0.5-inc1`, which MAE uses for fine-tuning
    (Sec. A.1). It departs from the paper: each op is applied with probability 0.5, and its level varies.

    Attributes:
        num_ops: ops drawn for each image.
        magnitude: mean level, 0 to 10.
        magnitude_std: standard deviation of the level, which is clipped to 0..10.
    """

    # By default timm draws bilinear or bicubic at random; MAE's code always asks for bicubic.
    resample = Image.Resampling.BICUBIC
    name = "randaugment"

    num_ops: int = 2
    magnitude: float = 9.0
    magnitude_std: float = 0.5

    def draw(self, keys: ViewKeys) -> list[tuple[Call, ...]]:
        """Draws the changes of each view, in the order they are applied."""
        drawn = keys.uniform(RngStream.POLICY, _RANDAUGMENT_DRAWS * self.num_ops)
        numbers = drawn.reshape(-1, self.num_ops, _RANDAUGMENT_DRAWS)
        names = np.array(list(RANDAUGMENT))[np.floor(numbers[..., 0] * len(RANDAUGMENT)).astype(np.int64)]
        applied = numbers[..., 1] < _RANDAUGMENT_SHARE
        signs = np.where(numbers[..., 2] < 0.5, -1, 1)
        # Normal numbers by Box and Muller (1958). u < 1, so the logarithm is finite.
        normal = np.sqrt(-2 * np.log(1 - numbers[..., 3])) * np.cos(2 * np.pi * numbers[..., 4])
        levels = np.clip(self.magnitude + self.magnitude_std * normal, 0, _MAX_LEVEL)
        # Round: the last bits of logarithm and cosine differ between processors.
        levels = np.round(levels, 6)
        return [
            tuple(
                RANDAUGMENT[name].call(name, level, sign)
                for name, level, sign, apply in zip(*of_image, strict=True)
                if apply
            )
            for of_image in zip(
                names.tolist(), levels.tolist(), signs.tolist(), applied.tolist(), strict=True
            )
        ]


def _blend(place: float) -> float:
    return 1.0 + 0.9 * place / _LAST_BIN


# The argument of each bin, as in torchvision. The largest shift is 150 px of 331 px, the paper's ImageNet size.
AUTOAUGMENT: dict[str, _Level] = {
    "ShearY": _Level(lambda place: 0.3 * place / _LAST_BIN, signed=True),
    "TranslateX": _Level(lambda place: 150 / 331 * place / _LAST_BIN, signed=True),
    "TranslateY": _Level(lambda place: 150 / 331 * place / _LAST_BIN, signed=True),
    "Rotate": _Level(lambda place: 30.0 * place / _LAST_BIN, signed=True),
    "Brightness": _Level(_blend, signed=True),
    "Color": _Level(_blend, signed=True),
    "Contrast": _Level(_blend, signed=True),
    "Sharpness": _Level(_blend, signed=True),
    "Posterize": _Level(lambda place: 8 - round(4 * place / _LAST_BIN)),
    "Solarize": _Level(lambda place: 255.0 * (_LAST_BIN - place) / _LAST_BIN),
    "AutoContrast": _Level(),
    "Equalize": _Level(),
    "Invert": _Level(),
}
# Pairs of op, probability and bin (None where the op has no magnitude), from the paper's appendix.
CIFAR10_POLICY = AutoAugment(AutoAugmentPolicy.CIFAR10).policies


@dataclass(frozen=True)
class AutoAugmentCifar(_Policy):
    """AutoAugment's policy for CIFAR-10: each image gets one of 25 pairs of ops (arXiv 1805.09501).

    It is torchvision's `AutoAugment(AutoAugmentPolicy.CIFAR10)`, but fills pixels from outside with the data's mean
    color, not black, and computes in float64, which changes some values by 1 of 255. Images of 32 px shift by up to
    14 px, as in torchvision; in the authors' code by up to 10 px.
    """

    # torchvision's default, and the default of PIL in the authors' code.
    resample = Image.Resampling.NEAREST
    name = "autoaugment_cifar"

    def draw(self, keys: ViewKeys) -> list[tuple[Call, ...]]:
        """Draws the changes of each view, in the order they are applied."""
        numbers = keys.uniform(RngStream.POLICY, 5)
        chosen = np.floor(numbers[:, 0] * len(CIFAR10_POLICY)).astype(np.int64)
        signs = np.where(numbers[:, 3:] < 0.5, -1, 1)
        return [
            tuple(
                AUTOAUGMENT[op].call(op, place or 0, sign)
                for (op, share, place), number, sign in zip(CIFAR10_POLICY[pair], *of_image, strict=True)
                if number < share
            )
            for pair, *of_image in zip(chosen.tolist(), numbers[:, 1:3].tolist(), signs.tolist(), strict=True)
        ]
