"""Changes of color: drawn by key, exact, and those that their names say."""

import numpy as np
import pytest
import torch
from helpers.images import smooth
from torchvision.transforms.v2 import functional as theirs

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
