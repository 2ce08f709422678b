"""Attention and features: weights of the blocks themselves; maps, rollout and statistics by hand or plain loops."""

import math

import numpy as np
import pytest
import torch
from helpers.export import classifier_file

from mae_vit.inspection.figures import by_depth
from mae_vit.inspection.measures import (
    attention_maps,
    attention_weights,
    feature_components,
    head_entropy,
    mean_attention_distance,
    position_similarity,
    rollout,
)
from mae_vit.inspection.views import patch_features
from mae_vit.models.attention import set_fused_attention
from mae_vit.models.encoders.vit import ViTEncoder
from mae_vit.weights.encoder import load_encoder


@pytest.mark.parametrize("fused", [True, False])
def test_weights_give_the_blocks_own_output_and_reading_changes_nothing(fused):
    """Weights times values, projected, is what the block's attention says itself."""
    torch.manual_seed(0)
    encoder = ViTEncoder(img_size=(12, 8), patch_size=4, embed_dim=24, depth=2, num_heads=3).train()
    set_fused_attention(encoder, fused=fused)
    images, caught = torch.randn(2, 3, 12, 8), {}
    attention = encoder.blocks[-1].attn
    handle = attention.register_forward_hook(
        lambda module, inputs, output: caught.update(x=inputs[0], y=output)
    )
    before = encoder(images)
    handle.remove()
    weights = attention_weights(encoder, images)
    assert encoder.training
    assert not attention._forward_pre_hooks
    assert torch.equal(encoder(images), before)
    assert [block.shape for block in weights] == [(2, 3, 7, 7)] * 2
    torch.testing.assert_close(weights[-1].sum(dim=-1), torch.ones(2, 3, 7))
    values = attention.qkv(caught["x"])[..., 48:].unflatten(-1, (3, 8)).transpose(1, 2)
    output = attention.proj((weights[-1] @ values).transpose(1, 2).flatten(2))
    torch.testing.assert_close(output, caught["y"], atol=1e-5, rtol=1e-5)


def test_maps_lie_as_the_patches_do_and_several_class_tokens_are_averaged():
    one = torch.zeros(1, 1, 7, 7)
    one[0, 0, :, 0] = 0.5
    one[0, 0, 0, 4] = 0.5  # [CLS] looks at the fourth patch: second row, second of two columns
    one[0, 0, 1:, 1] = 0.5
    two = torch.zeros(1, 1, 8, 8)
    two[0, 0, 0, 2] = 1  # the first of two looks at the first patch
    two[0, 0, 1, 7] = 0.5  # the second at the last, and at itself
    two[0, 0, 1, 1] = 0.5
    two[0, 0, 2:, 3] = 1
    for weights, query, expected in (
        (one, "cls", [[0, 0], [0, 0.5], [0, 0]]),
        (one, "mean", [[0.5, 0], [0, 0], [0, 0]]),
        (two, "cls", [[0.5, 0], [0, 0], [0, 0.25]]),
        (two, "mean", [[0, 1], [0, 0], [0, 0]]),
    ):
        assert attention_maps(weights, (3, 2), query=query)[0, 0].tolist() == expected


def test_rollout_against_plain_loops():
    generator = torch.Generator().manual_seed(0)
    weights = [torch.rand(2, 2, 7, 7, generator=generator).softmax(-1) for _ in range(3)]
    rolled = rollout(weights)
    for image in range(2):
        joint = np.eye(7)
        for block in weights:
            mixed = 0.5 * block[image].numpy().astype(np.float64).mean(axis=0) + 0.5 * np.eye(7)
            joint = (mixed / mixed.sum(axis=1, keepdims=True)) @ joint
        np.testing.assert_allclose(rolled[image].numpy(), joint, atol=1e-6)
    torch.testing.assert_close(rolled.sum(dim=-1), torch.ones(2, 7))


def test_distance_and_entropy_by_hand():
    """A grid of 2 x 2 patches of 4 px: neighbors are 4 px away, the opposite corner 4 * sqrt(2)."""
    weights = torch.zeros(1, 3, 5, 5)
    weights[0, 0, 1:, 1:] = torch.eye(4)  # each patch at itself
    weights[0, 1, 1:, 1:] = torch.eye(4).flip(0)  # each at the opposite corner
    weights[0, 2, 1:, 0] = 0.5  # half of it at [CLS], which has no place; the rest at the right neighbor
    for patch in range(4):
        weights[0, 2, 1 + patch, 1 + (patch ^ 1)] = 0.5
    distances = mean_attention_distance(weights, (2, 2), 4)
    torch.testing.assert_close(distances, torch.tensor([0.0, 4 * math.sqrt(2), 4.0]))
    weights = torch.zeros(1, 3, 4, 4)
    weights[0, 0], weights[0, 1], weights[0, 2, :, :2] = torch.eye(4), 0.25, 0.5
    expected = torch.tensor([0.0, math.log(4), math.log(2)])
    torch.testing.assert_close(head_entropy(weights), expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("value", "uniform", "top"), [(1.0, 10.0, 12), (9.0, 10.0, 12), (0.0, 0.0, 1), (20.0, 10.0, 21)]
)
def test_charts_of_two_encoders_have_one_axis_and_cut_nothing_off(value, uniform, top):
    axes = by_depth(np.full((4, 2), value), "distance", uniform=uniform, uniform_label="").axes[0]
    assert axes.get_ylim() == pytest.approx((0, top))


def test_similarity_of_positions_by_hand():
    table = torch.tensor([[[9.0, 9.0], [1.0, 0.0], [0.0, 2.0], [3.0, 3.0]]])  # [CLS] first: not counted
    root = 0.5**0.5
    expected = torch.tensor([[1.0, 0.0, root], [0.0, 1.0, root], [root, root, 1.0]])
    torch.testing.assert_close(position_similarity(table), expected)


def test_components_are_those_of_the_singular_value_decomposition():
    features = torch.randn(3, 20, 8, generator=torch.Generator().manual_seed(0))
    components, shares = feature_components(features)
    flat = features.flatten(0, 1).double().numpy()
    left, scales, _ = np.linalg.svd(flat - flat.mean(axis=0), full_matrices=False)
    np.testing.assert_allclose(
        components.flatten(0, 1).abs(), abs(left[:, :3] * scales[:3]), rtol=1e-4, atol=1e-5
    )
    np.testing.assert_allclose(shares, scales[:3] ** 2 / (scales**2).sum(), rtol=1e-5)
    assert torch.equal(components, feature_components(features)[0])


def test_patches_of_a_classifier_have_the_norm_of_its_mean(tmp_path):
    classifier_file(tmp_path / "model.safetensors", pool="mean")
    model = load_encoder(tmp_path / "model.safetensors")
    images = torch.arange(2 * 3 * 16 * 16, dtype=torch.uint8).view(2, 3, 16, 16)
    tokens = model.encoder.forward_features(model.normalize(images))[:, 1:]
    assert torch.equal(patch_features(model, images), model.fc_norm(tokens))
