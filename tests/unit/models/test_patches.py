"""Patches against slicing, colors against values worked out by hand."""

import pytest
import torch
from helpers.objectives import mean_color_classes

from mae_vit.models.patches import (
    join_bins,
    mean_band_bins,
    mean_color_bins,
    patchify,
    split_bins,
    unpatchify,
)


@pytest.mark.parametrize(("shape", "patch"), [((2, 3, 8, 12), 4), ((1, 1, 6, 6), 2), ((2, 3, 14, 7), 7)])
def test_patchify_matches_slicing_and_inverts(shape, patch):
    images = torch.randn(shape)
    patches = patchify(images, patch)
    columns = shape[3] // patch
    for number in range(patches.shape[1]):
        row, column = divmod(number, columns)
        cut = images[:, :, row * patch : (row + 1) * patch, column * patch : (column + 1) * patch]
        assert torch.equal(patches[:, number], cut.permute(0, 2, 3, 1).flatten(1))
    assert torch.equal(unpatchify(patches, patch, shape[2:]), images)


def test_mean_color_classes_by_hand():
    image = torch.zeros(1, 3, 2, 4, dtype=torch.uint8)
    # Left patch: R mean (0+10+255+255)/4 = 130 -> bin 4; G mean 31.75 -> bin 0; B 32 -> bin 1.
    image[0, 0, :, :2] = torch.tensor([[0, 10], [255, 255]])
    image[0, 1, :, :2] = torch.tensor([[31, 32], [32, 32]])
    image[0, 2, :, :2] = 32
    # Right patch: 255 -> 7; 224 -> 7; 223 -> 6.
    image[0, 0, :, 2:], image[0, 1, :, 2:], image[0, 2, :, 2:] = 255, 224, 223
    assert mean_color_classes(image, 2).tolist() == [[64 * 4 + 8 * 0 + 1, 64 * 7 + 8 * 7 + 6]]


def test_split_bins_lie_in_their_class():
    classes = torch.arange(512)[None]
    colors = split_bins(classes, 3) * 32 + 16
    painted = unpatchify(colors.repeat(1, 1, 4), 2, (32, 64)).byte()
    assert torch.equal(mean_color_classes(painted, 2), classes)
    assert torch.equal(join_bins(split_bins(classes, 3)), classes)


def test_mean_bins_of_bands_by_hand():
    """One patch of two bands: means of valid values 0.5 and 1.7; another with one value, 0.124, and none."""
    images = torch.zeros(1, 2, 2, 4)
    valid = torch.ones(1, 2, 2, 4, dtype=torch.bool)
    images[0, 0, :, :2] = torch.tensor([[0.25, 0.75], [0.0, 0.5]])
    valid[0, 0, 1, 0] = False
    images[0, 1, :, :2] = 1.7
    valid[0, :, :, 2:] = False
    images[0, 0, 0, 2], valid[0, 0, 0, 2] = 0.124, True
    bins, known = mean_band_bins(images, 2, valid)
    assert bins.tolist() == [[[4, 7], [0, 0]]]
    assert known is not None
    assert known.tolist() == [[[True, True], [True, False]]]
    assert mean_band_bins(images - 1, 2)[0].max() == 5  # values below count for the first bin


def test_bins_of_bands_are_those_of_the_same_image_in_8_bits():
    images = torch.randint(0, 256, (4, 5, 8, 8), dtype=torch.uint8)
    bins, known = mean_band_bins(images.float() / 256, 4)
    assert known is None
    assert torch.equal(bins, mean_color_bins(images, 4))
