"""Kinds of masks: how many patches are masked, and where."""

import pytest
import torch

from mae_vit.core.keyed_rng import SampleKeys
from mae_vit.inspection.reconstructions import MASK_KINDS, draw_masking
from mae_vit.models.masking import patch_noise, random_masking, unit_masking

KEYS = SampleKeys(0, 0, torch.arange(3))


def masked(kind, grid, ratio):
    return draw_masking(kind, KEYS, grid, ratio, 1).mask.reshape(3, *grid)


@pytest.mark.parametrize("kind", MASK_KINDS)
@pytest.mark.parametrize(("grid", "ratio"), [((8, 8), 0.75), ((6, 10), 0.9)])
def test_all_kinds_mask_as_many(kind, grid, ratio):
    masking = draw_masking(kind, KEYS, grid, ratio, 1)
    assert all(len(row.unique()) == grid[0] * grid[1] for row in masking.ids_restore)
    total = grid[0] * grid[1]
    assert (masked(kind, grid, ratio).sum(dim=(1, 2)) == total - int(total * (1 - ratio))).all()


def test_random_is_trainings():
    expected = random_masking(patch_noise(KEYS, 64), 0.75).mask
    assert torch.equal(draw_masking("random", KEYS, (8, 8), 0.75, 1).mask, expected)
    blocks = unit_masking(KEYS, (8, 8), 0.75, 4).mask
    assert torch.equal(draw_masking("random", KEYS, (8, 8), 0.75, 4).mask, blocks)


def test_a_block_is_around_the_middle():
    mask = masked("block", (8, 8), 0.5625)[0]
    expected = torch.zeros(8, 8)
    expected[1:7, 1:7] = 1
    assert torch.equal(mask, expected)


def test_a_grid_leaves_every_second_row_and_column():
    visible = 1 - masked("grid", (8, 8), 0.75)[0]
    expected = torch.zeros(8, 8)
    expected[::2, ::2] = 1
    assert torch.equal(visible, expected)
    assert torch.equal(1 - masked("grid", (8, 8), 0.5)[0], expected + expected.roll((1, 1), (0, 1)))
