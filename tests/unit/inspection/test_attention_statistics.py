"""Rollout, attention distance and entropy: by hand, and against plain loops."""

import math

import numpy as np
import pytest
import torch

from mae_vit.inspection.attention import head_entropy, mean_attention_distance, rollout
from mae_vit.inspection.figures import by_depth


def random_weights(seed, blocks=3, batch=2, heads=2, tokens=7):
    generator = torch.Generator().manual_seed(seed)
    return [torch.rand(batch, heads, tokens, tokens, generator=generator).softmax(-1) for _ in range(blocks)]


def test_rollout_against_plain_loops():
    weights = random_weights(0)
    rolled = rollout(weights)
    for image in range(2):
        joint = np.eye(7)
        for block in weights:
            mixed = 0.5 * block[image].numpy().astype(np.float64).mean(axis=0) + 0.5 * np.eye(7)
            joint = (mixed / mixed.sum(axis=1, keepdims=True)) @ joint
        np.testing.assert_allclose(rolled[image].numpy(), joint, atol=1e-6)
    torch.testing.assert_close(rolled.sum(dim=-1), torch.ones(2, 7))
    with pytest.raises(ValueError, match="at least one block"):
        rollout([])


def test_distance_by_hand():
    """A grid of 2 x 2 patches of 4 px: neighbors are 4 px away, the opposite corner 4 * sqrt(2)."""
    weights = torch.zeros(1, 3, 5, 5)
    weights[0, 0, 1:, 1:] = torch.eye(4)  # each patch at itself
    weights[0, 1, 1:, 1:] = torch.eye(4).flip(0)  # each at the opposite corner
    weights[0, 2, 1:, 0] = 0.5  # half of it at [CLS], which has no place; the rest at the right neighbor
    for patch in range(4):
        weights[0, 2, 1 + patch, 1 + (patch ^ 1)] = 0.5
    distances = mean_attention_distance(weights, (2, 2), 4)
    torch.testing.assert_close(distances, torch.tensor([0.0, 4 * math.sqrt(2), 4.0]))


def test_entropy_by_hand():
    weights = torch.zeros(1, 3, 4, 4)
    weights[0, 0] = torch.eye(4)
    weights[0, 1] = 0.25
    weights[0, 2, :, :2] = 0.5
    expected = torch.tensor([0.0, math.log(4), math.log(2)])
    torch.testing.assert_close(head_entropy(weights), expected, atol=1e-6, rtol=0)


def test_charts_of_two_encoders_have_one_axis():
    """Side by side they are read as heights."""
    low, high = (
        by_depth(np.full((4, 2), value), "distance", uniform=10.0, uniform_label="all alike").axes[0]
        for value in (1.0, 9.0)
    )
    assert low.get_ylim() == high.get_ylim() == (0, 12)
    # Of one patch.
    assert by_depth(np.zeros((4, 2)), "", uniform=0.0, uniform_label="").axes[0].get_ylim() == (0, 1)
    # Nothing is cut off.
    assert by_depth(np.full((4, 2), 20.0), "", uniform=10.0, uniform_label="").axes[0].get_ylim()[1] > 20
