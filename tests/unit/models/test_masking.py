"""Masks and corruption: counts, shares, and the facts that parity rests on."""

import pytest
import torch

from mae_vit.core.keyed_rng import SampleKeys
from mae_vit.models.masking import (
    KIND_MASK,
    KIND_RANDOM,
    KIND_UNCHANGED,
    corrupt,
    nearest_visible,
)
from mae_vit.models.sizes import num_masked_patches


@pytest.mark.parametrize(
    ("patches", "ratio", "masked"), [(64, 0.75, 48), (196, 0.75, 147), (16, 0.5, 8), (10, 0.75, 8)]
)
def test_number_of_masked_patches_rounds_as_the_official_code(patches, ratio, masked):
    assert num_masked_patches(patches, ratio) == masked == patches - int(patches * (1 - ratio))


def corruption(num_samples: int = 500):
    return corrupt(SampleKeys(0, 0, torch.arange(num_samples)), 64, 0.5)


def test_corruption_counts_and_shares():
    drawn = corruption(5000)
    assert drawn.ids.shape == (5000, 32)
    assert (drawn.mask.sum(dim=1) == 32).all()
    assert (drawn.mask.gather(1, drawn.ids) == 1).all()
    for kind, share in ((KIND_MASK, 0.8), (KIND_RANDOM, 0.1), (KIND_UNCHANGED, 0.1)):
        drawn_share = (drawn.kind == kind).float().mean().item()
        # 160,000 draws: standard deviation at most 0.001.
        assert drawn_share == pytest.approx(share, abs=0.005)


def test_a_random_source_is_another_patch_and_any_other():
    drawn = corruption(5000)
    assert (drawn.source != drawn.ids).all()
    assert drawn.source.min() >= 0
    assert drawn.source.max() < 64
    distance = (drawn.source - drawn.ids) % 64
    counts = torch.bincount(distance.flatten(), minlength=64)
    assert counts[0] == 0
    expected = distance.numel() / 63
    assert ((counts[1:] - expected).abs() < 5 * expected**0.5).all()


def test_nearest_visible_against_brute_force():
    mask = corruption(20).mask
    nearest = nearest_visible(mask, (8, 8))
    for sample in range(20):
        for patch in range(64):
            candidates = [
                ((patch // 8 - other // 8) ** 2 + (patch % 8 - other % 8) ** 2, other)
                for other in range(64)
                if mask[sample, other] == 0
            ]
            assert nearest[sample, patch] == min(candidates)[1]
