"""Random erasing: shares, shapes and bytes, against timm."""

import math

import numpy as np
import pytest

from mae_vit.data.images.augment import Augment

MANY = np.arange(20_000)


ERASED = Augment(img_size=(32, 40), erasing=0.25)


@pytest.mark.parametrize("channels", [1, 3])
def test_bytes_change_inside_the_box_alone_and_are_uniform(channels):
    images = np.full((600, channels, 32, 40), 77, np.uint8)
    view = ERASED.draw(0, 0, MANY[:600])
    batch = ERASED.apply(images, view)
    assert (images == 77).all()
    inside = []
    for image, (top, left, height, width) in zip(batch, view.erasing.boxes, strict=True):
        box = np.zeros((32, 40), bool)
        box[top : top + height, left : left + width] = True
        assert (image[:, ~box] == 77).all()
        inside.append(image[:, box])
    pixels = np.concatenate(inside, axis=1)
    counts = np.bincount(pixels.ravel(), minlength=256)
    expected = pixels.size / 256
    # Chi square of 255 degrees of freedom.
    assert abs(((counts - expected) ** 2 / expected).sum() - 255) < 5 * math.sqrt(2 * 255)
    # Of each channel, and of the pixel to the left.
    series = np.concatenate([pixels[:, 1:], pixels[:1, :-1]]).astype(float)
    assert np.abs(np.corrcoef(series) - np.eye(channels + 1)).max() < 5 / math.sqrt(pixels.shape[1])
    beginnings = {part.ravel()[:20].tobytes() for part in inside if part.size}
    assert len(beginnings) == (view.erasing.boxes[:, 2] > 0).sum()


def test_an_image_of_few_pixels_may_be_too_small_to_erase():
    images = np.full((300, 1, 2, 2), 77, np.uint8)
    augment = Augment(img_size=(2, 2), erasing=1.0)
    view = augment.draw(0, 0, MANY[:300])
    assert 0 < (view.erasing.boxes[:, 2] > 0).mean() < 1
    augment.apply(images, view)
