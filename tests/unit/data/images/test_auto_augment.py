"""Policies and erasing: as timm's and torchvision's, drawn by key alone."""

import math
import random
from collections import Counter

import numpy as np
import pytest
from helpers.images import assert_share, smooth
from PIL import Image
from timm.data import auto_augment as timm_ops
from torchvision.transforms import AutoAugment, AutoAugmentPolicy, InterpolationMode
from torchvision.transforms.autoaugment import _apply_op

from mae_vit.core.keyed_rng import ViewKeys
from mae_vit.data.images.auto_augment import (
    AUTOAUGMENT,
    CIFAR10_POLICY,
    RANDAUGMENT,
    AutoAugmentCifar,
    RandAugment,
)

FILL = (120, 60, 30)
LEVELS = (0.0, 0.7, 2.49, 5.0, 8.99, 9.5, 10.0)
TORCHVISION = AutoAugment(AutoAugmentPolicy.CIFAR10)
MANY = np.arange(20_000)


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


def test_randaugment_draws_uniform_ops_half_of_them_and_normal_levels():
    drawn = RandAugment(num_ops=3, magnitude=5.0, magnitude_std=0.5).draw(ViewKeys(0, 0, MANY))
    calls = [call for of_image in drawn for call in of_image]
    total = 3 * len(MANY)
    assert_share(len(calls), total, 0.5)
    for count in Counter(call.op for call in calls).values():
        assert_share(count, total, 0.5 / len(RANDAUGMENT))
    assert {call.op for call in calls} == set(RANDAUGMENT)
    both = Counter(len(of_image) for of_image in drawn)
    for number, share in enumerate((1 / 8, 3 / 8, 3 / 8, 1 / 8)):
        assert_share(both[number], len(MANY), share)
    degrees = np.array([call.arguments[0] for call in calls if call.op == "Rotate"])
    assert_share((degrees < 0).sum(), len(degrees), 0.5)
    levels = np.abs(degrees) / 3
    assert levels.mean() == pytest.approx(5.0, abs=5 * 0.5 / math.sqrt(len(levels)))
    assert levels.std() == pytest.approx(0.5, rel=5 / math.sqrt(2 * len(levels)))
    assert_share((np.abs(levels - 5) < 0.5).sum(), len(levels), 0.6827)
    assert 2.5 < levels.min() < levels.max() < 7.5


def test_levels_are_clipped_and_constant_without_noise():
    def levels(policy: RandAugment) -> np.ndarray:
        calls = [call for of_image in policy.draw(ViewKeys(0, 0, MANY[:4000])) for call in of_image]
        return np.abs([call.arguments[0] for call in calls if call.op == "Rotate"]) / 3

    clipped = levels(RandAugment(magnitude=9.5, magnitude_std=3.0))
    assert clipped.max() == 10
    assert (clipped == 10).mean() == pytest.approx(0.434, abs=0.15)
    assert levels(RandAugment(magnitude=0.1, magnitude_std=3.0)).min() == 0
    assert set(levels(RandAugment(magnitude=7.0, magnitude_std=0.0)).round(9)) == {7.0}


def test_autoaugment_draws_pairs_probabilities_and_signs_by_its_table():
    drawn = AutoAugmentCifar().draw(ViewKeys(0, 0, MANY))
    counts = Counter(call.op for of_image in drawn for call in of_image)
    for name in AUTOAUGMENT:
        shares = [share / 25 for pair in CIFAR10_POLICY for op, share, _ in pair if op == name]
        error = math.sqrt(len(MANY) * sum(shares))  # an upper bound
        assert abs(counts[name] - len(MANY) * sum(shares)) < 5 * error, name
    both = sum(one * other / 25 for (_, one, _), (_, other, _) in CIFAR10_POLICY)
    assert_share(sum(len(of_image) == 2 for of_image in drawn), len(MANY), both)
    for place in (0, 1):  # each op of a pair has a sign of its own
        degrees = [
            of_image[place].arguments[0]
            for of_image in drawn
            if len(of_image) == 2 and of_image[place].op == "TranslateY"
        ]
        assert_share(sum(shift < 0 for shift in degrees), len(degrees), 0.5)
    shifts = [of_image for of_image in drawn if [call.op for call in of_image] == ["TranslateY"] * 2]
    signs = [math.copysign(1, one.arguments[0] * other.arguments[0]) for one, other in shifts]
    assert_share(signs.count(1.0), len(signs), 0.5)
