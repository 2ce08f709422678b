"""Views of whole batches: the pixels of `Augment`, to the bit."""

from itertools import product

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from mae_vit.data.images.augment import Augment
from mae_vit.data.images.batched import MOST_PX, BatchedCrop, boxes_and_flips, cached_crop, resizes, shift
from mae_vit.data.images.color import ColorJitter

CPU = torch.device("cpu")
BOX = {"crop": "random_resized", "scale": (0.2, 1.0), "ratio": (3 / 4, 4 / 3)}
WAYS = {
    "none": {},
    "pad": {"crop": "pad", "pad_px": 4},
    "random_resized": BOX,
    "bilinear": {**BOX, "interpolation": "bilinear"},
    "pad and color": {"crop": "pad", "pad_px": 3, "policy": ColorJitter()},
    "random_resized and color": {**BOX, "policy": ColorJitter()},
    # Few of the boxes fit: the others fall back.
    "large boxes": {"crop": "random_resized", "scale": (0.9, 1.0), "ratio": (0.5, 2.0)},
}


def pixels(*shape: int) -> np.ndarray:
    """Noise: the sharpest edges there can be, which overshoot at every place."""
    return np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)


@pytest.mark.parametrize(
    ("way", "channels", "size", "img_size"),
    [
        *product(WAYS, [3, 1], [(32, 32)], [(32, 32)]),
        *product(["none", "random_resized", "bilinear"], [3], [(24, 40), (96, 48)], [(32, 32), (20, 28)]),
    ],
)
def test_a_batch_has_the_pixels_of_its_images(way, channels, size, img_size):
    augment = Augment(img_size=img_size, flip=True, **WAYS[way])
    images, index = pixels(200, channels, *size), np.arange(200) + 7
    drawn = augment.draw(3, 5, index)
    crop = cached_crop(size, img_size, augment.interpolation, CPU) if resizes(augment, size) else shift
    views = crop(torch.from_numpy(images), torch.from_numpy(boxes_and_flips(augment, drawn, size)))
    if augment.policy is not None:
        views = augment.policy.apply_batch(views, torch.from_numpy(drawn.calls))
    np.testing.assert_array_equal(views.numpy(), augment.apply(images, drawn))


@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear"])
@pytest.mark.parametrize("new", [8, 32, MOST_PX])
def test_every_length_is_resized_as_torch_does_it(interpolation, new):
    """To float32 where that is exact, else to float64."""
    image = torch.from_numpy(pixels(1, 3, MOST_PX, MOST_PX))
    crop = BatchedCrop((MOST_PX, MOST_PX), (new, new), interpolation, CPU)
    assert new == 32 or crop._dtype == (torch.float64 if new < 32 else torch.float32)
    for length in range(1, MOST_PX + 1):
        first, wide = MOST_PX - length, MOST_PX + 1 - length
        box = torch.tensor([[first, 0, length, wide, 0]])
        cut = image[:, :, first:, :wide].contiguous()
        expected = F.interpolate(cut, (new, new), mode=interpolation, antialias=True)
        assert torch.equal(crop(image, box), expected), length
