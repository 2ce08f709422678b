"""Crops and flips: where boxes lie, what they show, and that keys alone decide."""

import numpy as np
import pytest
from helpers.images import smooth
from PIL import Image

from mae_vit.data.images.augment import Augment

INDEX = np.arange(2000)
BOX = {"scale": (0.2, 1.0), "ratio": (3 / 4, 4 / 3)}


def test_random_boxes_stay_inside_and_have_the_asked_area_and_shape():
    augment = Augment(img_size=(32, 32), crop="random_resized", scale=(0.2, 0.9), ratio=(0.75, 4 / 3))
    boxes = augment.boxes(augment.draw(0, 0, INDEX), (400, 440))
    top, left, height, width = boxes.T
    # All corners are reached, and nothing outside.
    assert (top.min(), left.min(), (top + height).max(), (left + width).max()) == (0, 0, 400, 440)
    area = height * width / (400 * 440)
    assert 0.19 < area.min() < 0.25
    assert 0.85 < area.max() < 0.91
    ratio = width / height
    assert 0.74 < ratio.min() < 0.8
    assert 1.25 < ratio.max() < 1.35


def test_random_boxes_follow_torchvision_in_distribution():
    import torch
    from torchvision.transforms import RandomResizedCrop

    torch.manual_seed(0)
    image = torch.empty(1, 300, 500)
    theirs = np.array([RandomResizedCrop.get_params(image, [0.2, 1.0], [0.75, 4 / 3]) for _ in range(4000)])
    augment = Augment(img_size=(32, 32), crop="random_resized", **BOX)
    ours = augment.boxes(augment.draw(0, 0, np.arange(4000)), (300, 500))
    for column in range(4):
        # Two samples of 4,000: the standard error of the difference is at most 2 % of the spread.
        spread = theirs[:, column].std()
        assert abs(theirs[:, column].mean() - ours[:, column].mean()) < 0.1 * spread
        assert abs(theirs[:, column].std() - ours[:, column].std()) < 0.08 * spread


def test_an_image_too_narrow_falls_back_to_its_center():
    augment = Augment(img_size=(8, 8), crop="random_resized", scale=(0.9, 1.0), ratio=(0.75, 4 / 3))
    boxes = augment.boxes(augment.draw(0, 0, np.arange(5)), (10, 200))
    assert (boxes == [0, 93, 10, 13]).all()


def test_resize_is_bicubic_as_pillow_does_it():
    rng = np.random.default_rng(0)
    smooth = Image.fromarray(rng.integers(0, 256, (12, 16, 3), dtype=np.uint8)).resize(
        (160, 120), Image.BICUBIC
    )
    pixels = np.asarray(smooth).transpose(2, 0, 1)
    box = (10, 20, 90, 100)
    ours = Augment(img_size=(32, 32), crop="random_resized", **BOX).crop_resize_flip(pixels, box, False)
    theirs = np.asarray(smooth.crop((20, 10, 120, 100)).resize((32, 32), Image.BICUBIC)).transpose(2, 0, 1)
    difference = np.abs(ours.astype(int) - theirs)
    assert difference.mean() < 0.1
    assert difference.max() <= 1


def test_pad_shifts_by_up_to_its_width_and_fills_with_zeros():
    image = np.arange(1, 65, dtype=np.uint8).reshape(1, 8, 8)
    augment = Augment(img_size=(8, 8), crop="pad", pad_px=2)
    view = augment.draw(0, 0, np.arange(200))
    seen = set()
    batch = augment.apply(np.repeat(image[None], 200, axis=0), view)
    padded = np.pad(image, ((0, 0), (2, 2), (2, 2)))
    for number, (top, left, *_) in enumerate(augment.boxes(view, (8, 8))):
        seen.add((int(top), int(left)))
        expected = padded[:, top + 2 : top + 10, left + 2 : left + 10]
        np.testing.assert_array_equal(batch[number], expected)
    assert seen == {(row, column) for row in range(-2, 3) for column in range(-2, 3)}


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("crop", [{"crop": "none"}, {"crop": "random_resized", **BOX}])
def test_pixels_do_not_depend_on_how_they_lie_in_memory(crop, channels):
    """Decoders write channels side by side, arrays of small images hold planes."""
    planes = smooth(channels, 90, 120, count=12)
    pixels = np.ascontiguousarray(planes.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2)
    augment = Augment(img_size=(32, 48), **crop, flip=True)
    view = augment.draw(0, 0, np.arange(12))
    views = augment.apply(planes, view)
    np.testing.assert_array_equal(augment.apply(pixels, view), views)
    locked = planes.copy()
    locked.flags.writeable = False
    np.testing.assert_array_equal(augment.apply(locked, view), views)


@pytest.mark.parametrize("crop", [{"crop": "none"}, {"crop": "pad", "pad_px": 4}])
def test_what_is_augmented_stays_as_it_was(crop):
    images = smooth(3, 32, 32, count=12)
    before = images.copy()
    augment = Augment(img_size=(32, 32), **crop, flip=True, erasing=1.0)
    views = augment.apply(images, augment.draw(0, 0, np.arange(12)))
    assert views.flags.c_contiguous
    assert (views != before).any(axis=(1, 2, 3)).all()
    np.testing.assert_array_equal(images, before)
