"""Changes of color: drawn by key, exact, and those that their names say."""

import numpy as np
import pytest
import torch
from helpers.images import smooth
from torchvision.transforms.v2 import functional as theirs

from mae_vit.core.keyed_rng import ViewKeys
from mae_vit.data.images.color import ColorJitter, coefficients_of

NOTHING = {"brightness": 1, "contrast": 1, "saturation": 1, "angle": 0, "gray": 0}


def changed(image: np.ndarray, **parts) -> np.ndarray:
    numbers = coefficients_of(np.array([*(NOTHING | parts).values()], np.float64)[:, None])
    return ColorJitter().apply_batch(torch.from_numpy(image)[None], torch.from_numpy(numbers))[0].numpy()


def middle(channels: int = 3) -> np.ndarray:
    """A picture of which no change below clips a value."""
    return (smooth(channels)[0] // 4 + 96).astype(np.uint8)


@pytest.mark.parametrize("channels", [3, 1])
def test_factors_of_one_change_nothing(channels):
    image = smooth(channels)[0]
    np.testing.assert_array_equal(changed(image), image)


@pytest.mark.parametrize(
    ("parts", "function", "argument"),
    [
        ({"brightness": 1.3}, theirs.adjust_brightness, 1.3),
        ({"brightness": 0.7}, theirs.adjust_brightness, 0.7),
        ({"contrast": 1.3}, theirs.adjust_contrast, 1.3),
        ({"contrast": 0.6}, theirs.adjust_contrast, 0.6),
        ({"saturation": 1.4}, theirs.adjust_saturation, 1.4),
        ({"saturation": 0.6}, theirs.adjust_saturation, 0.6),
        ({"gray": True}, theirs.rgb_to_grayscale, 3),
    ],
)
def test_pixels_are_torchvisions(parts, function, argument):
    image = middle()
    expected = function(torch.from_numpy(image).float() / 255, argument).numpy() * 255
    assert np.abs(changed(image, **parts) - expected).max() < 0.75  # half a step, and 12 bits of a factor


def test_hue_turns_color_and_keeps_gray_values():
    image = middle()
    weights = np.array([0.299, 0.587, 0.114])[:, None, None]
    turned = changed(image, angle=0.6)
    assert np.abs(turned.astype(int) - image).max() > 2
    assert np.abs((weights * turned).sum(0) - (weights * image).sum(0)).max() < 1
    back = changed(turned, angle=-0.6)
    assert np.abs(back.astype(int) - image).max() <= 2


def test_draws_are_in_their_ranges():
    def drawn(**options: float) -> np.ndarray:
        nothing = dict.fromkeys(("brightness", "contrast", "saturation", "hue", "gray"), 0.0)
        policy = ColorJitter(**(nothing | options))
        return policy.draw_batch(ViewKeys(3, 1, np.arange(4000))).T / 4096

    maps = drawn(saturation=0.2)[2:11]
    turned = drawn(hue=0.1)[2:11]
    angle = np.arccos(np.minimum((turned[[0, 4, 8]].sum(0) - 1) / 2, 1))  # the trace of a rotation
    for moved, reach in (
        (drawn(brightness=0.4)[0] - 1, 0.4),
        (drawn(contrast=0.3)[0] - 1, 0.3),
        (-maps[1] / 0.587, 0.2),
        (angle * np.sign(turned[1]), 0.2 * np.pi),
    ):
        assert np.abs(moved).max() <= reach + 1e-3
        assert moved.min() < -0.97 * reach
        assert moved.max() > 0.97 * reach
    grays = drawn(gray=0.2)
    assert (grays[2:5] == grays[11:]).all(axis=0).mean() == pytest.approx(0.2, abs=0.03)
