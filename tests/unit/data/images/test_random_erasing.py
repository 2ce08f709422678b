"""Random erasing: shares, shapes and bytes, against timm."""

import math
import random

import numpy as np
import pytest
import torch
from helpers.images import assert_share
from timm.data.random_erasing import RandomErasing

from mae_vit.data.images.augment import Augment

MANY = np.arange(20_000)


ERASED = Augment(img_size=(32, 40), erasing=0.25)


def test_erased_boxes_have_the_papers_share_and_lie_inside():
    boxes = ERASED.draw(0, 0, MANY).erasing.boxes
    erased = boxes[:, 2] > 0
    assert_share(erased.sum(), len(MANY), 0.25)
    assert not boxes[~erased].any()
    top, left, height, width = boxes[erased].T
    assert (top.min(), left.min(), (top + height).max(), (left + width).max()) == (0, 0, 32, 40)


def test_erased_boxes_follow_timms_in_distribution():
    random.seed(0)
    erase = RandomErasing(probability=1.0, mode="const", max_area=1 / 3, device="cpu")
    theirs = []
    for _ in range(4000):
        rows, columns = np.nonzero(erase(torch.ones(1, 32, 40))[0].numpy() == 0)
        theirs.append([rows.min(), columns.min(), np.ptp(rows) + 1, np.ptp(columns) + 1])
    always = Augment(img_size=(32, 40), erasing=1.0)
    ours = always.draw(0, 0, MANY[:4000]).erasing.boxes
    assert (ours[:, 2] > 0).all()
    for one, other in zip(np.array(theirs).T, ours.T, strict=True):
        assert abs(one.mean() - other.mean()) < 0.1 * one.std()
        assert abs(one.std() - other.std()) < 0.08 * one.std()


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
