"""Changes of color: drawn by key, exact, and those that their names say."""

import numpy as np
import pytest
import torch
from helpers.images import smooth
from torchvision.transforms.v2 import functional as theirs

from mae_vit.core.keyed_rng import ViewKeys
from mae_vit.data.images.augment import Augment
from mae_vit.data.images.color import Change, ColorJitter

NOTHING = Change(1.0, 1.0, 1.0, 0.0, False)


def changed(image: np.ndarray, **parts) -> np.ndarray:
    return ColorJitter().apply(image, NOTHING._replace(**parts), None)


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


def test_draws_are_in_their_ranges_and_by_key():
    index = np.arange(4000)
    policy = ColorJitter(brightness=0.4, contrast=0.3, saturation=0.2, hue=0.1, gray=0.2)
    drawn = np.array(policy.draw(ViewKeys(3, 1, index)), np.float64)
    for column, reach, center in ((0, 0.4, 1), (1, 0.3, 1), (2, 0.2, 1), (3, 0.2 * np.pi, 0)):
        moved = drawn[:, column] - center
        assert np.abs(moved).max() <= reach
        assert moved.min() < -0.98 * reach
        assert moved.max() > 0.98 * reach
    assert drawn[:, 4].mean() == pytest.approx(0.2, abs=0.03)
    assert policy.draw(ViewKeys(3, 1, index[7:9])) == policy.draw(ViewKeys(3, 1, index))[7:9]
    assert policy.draw(ViewKeys(3, 2, index[:4])) != policy.draw(ViewKeys(3, 1, index[:4]))


def test_a_batch_is_changed_as_its_images_are():
    images = np.stack([smooth(3)[0]] * 6)
    augment = Augment(img_size=images.shape[2:], policy=ColorJitter())
    views = augment.apply_batch(images, augment.draw(5, 0, np.arange(6)))
    assert len({view.tobytes() for view in views}) == 6
    calls = augment.policy.draw(ViewKeys(5, 0, np.arange(6)))
    for image, call, seen in zip(images, calls, views, strict=True):
        np.testing.assert_array_equal(augment.policy.apply(image, call, None), seen)
