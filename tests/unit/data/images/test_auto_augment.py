"""Policies and erasing: as timm's and torchvision's, drawn by key alone."""

import random

import numpy as np
import pytest
from helpers.images import smooth
from PIL import Image
from timm.data import auto_augment as timm_ops
from torchvision.transforms import AutoAugment, AutoAugmentPolicy, InterpolationMode
from torchvision.transforms.autoaugment import _apply_op

from mae_vit.data.images.auto_augment import (
    AUTOAUGMENT,
    RANDAUGMENT,
    AutoAugmentCifar,
    RandAugment,
)

FILL = (120, 60, 30)
LEVELS = (0.0, 0.7, 2.49, 5.0, 8.99, 9.5, 10.0)
TORCHVISION = AutoAugment(AutoAugmentPolicy.CIFAR10)


def as_picture(image: np.ndarray) -> Image.Image:
    return Image.fromarray(image[0] if len(image) == 1 else image.transpose(1, 2, 0).copy())


def as_array(picture: Image.Image) -> np.ndarray:
    pixels = np.asarray(picture)
    return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)


@pytest.fixture(params=[1, -1], ids=["plus", "minus"])
def sign(request, monkeypatch) -> int:
    """A sign, and timm's generator made to give it."""
    monkeypatch.setattr(random, "random", lambda: 0.9 if request.param < 0 else 0.1)
    return request.param


def test_the_ops_are_timms_increasing_ones():
    assert list(RANDAUGMENT) == timm_ops._RAND_INCREASING_TRANSFORMS


@pytest.mark.parametrize(
    ("name", "channels"), [(name, 1 + 2 * (n % 2)) for n, name in enumerate(RANDAUGMENT)]
)
def test_randaugment_ops_have_timms_pixels(name, channels, sign):
    image = smooth(channels)[0]
    hparams = {
        "img_mean": FILL if channels == 3 else FILL[0],
        "interpolation": Image.Resampling.BICUBIC,
    }
    seen = set()
    for level in LEVELS:
        ours = RandAugment().apply(image, (RANDAUGMENT[name].call(name, level, sign),), FILL[:channels])
        if (name, level) == ("PosterizeIncreasing", 10.0):  # Pillow 13 refuses timm's 0 bits
            assert not ours.any()
        else:
            theirs = timm_ops.AugmentOp(name, prob=1.0, magnitude=level, hparams=hparams)(as_picture(image))
            np.testing.assert_array_equal(ours, as_array(theirs))
        assert ours.dtype == np.uint8
        seen.add(ours.tobytes())
    if (name, channels) != ("ColorIncreasing", 1):  # gray has none
        assert seen != {image.tobytes()}


ENHANCING = ("Brightness", "Color", "Contrast", "Sharpness")
SHIFTING = ("TranslateX", "TranslateY")


def test_bins_stand_for_torchvisions_magnitudes():
    """Theirs are float32."""
    for name, level in AUTOAUGMENT.items():
        magnitudes, signed = TORCHVISION._augmentation_space(10, (1, 1))[name]
        assert level.signed == signed
        assert (level.argument is None) == (magnitudes.ndim == 0)
        for place, magnitude in enumerate(magnitudes.tolist() if level.argument else ()):
            for sign in (1, -1) if signed else (1,):
                expected = sign * magnitude + (name in ENHANCING)
                assert level.argument(sign * place) == pytest.approx(expected, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize(
    ("channels", "height", "width", "sign"),
    [(3, 32, 32, 1), (3, 32, 32, -1), (1, 28, 40, -1), (3, 331, 96, 1)],
)
@pytest.mark.parametrize("name", AUTOAUGMENT)
def test_autoaugment_ops_have_torchvisions_pixels(name, channels, height, width, sign):
    image, fill = smooth(channels, height, width)[0], FILL[:channels]
    for place in range(10) if height < 100 else (9,):
        call = AUTOAUGMENT[name].call(name, place, sign)
        magnitude = float(sum(call.arguments)) - (name in ENHANCING)
        if name in SHIFTING:  # theirs depends on the size
            magnitude = TORCHVISION._augmentation_space(10, (height, width))[name][0][place].item() * sign
        theirs = _apply_op(as_picture(image), name, magnitude, InterpolationMode.NEAREST, list(fill))
        np.testing.assert_array_equal(AutoAugmentCifar().apply(image, (call,), fill), as_array(theirs))
