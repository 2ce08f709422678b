"""Attention maps: the formula, and that reading them changes nothing."""

import pytest
import torch

from mae_vit.inspection.attention import attention_maps, attention_weights
from mae_vit.models.attention import set_fused_attention
from mae_vit.models.encoders.vit import ViTEncoder


@pytest.fixture
def encoder():
    torch.manual_seed(0)
    return ViTEncoder(img_size=(12, 8), patch_size=4, embed_dim=24, depth=3, num_heads=3)


@pytest.mark.parametrize("block", [0, 1, -1])
def test_weights_give_the_blocks_own_output(encoder, block):
    """Weights times values, projected, is what the block's attention says itself."""
    images = torch.randn(2, 3, 12, 8)
    said = {}
    attention = encoder.blocks[block].attn
    handle = attention.register_forward_hook(
        lambda module, inputs, output: said.update(x=inputs[0], y=output)
    )
    encoder.eval()(images)
    handle.remove()
    weights = attention_weights(encoder, images)[block]
    assert weights.shape == (2, 3, 7, 7)
    torch.testing.assert_close(weights.sum(dim=-1), torch.ones(2, 3, 7))
    values = attention.qkv(said["x"])[..., 48:].unflatten(-1, (3, 8)).transpose(1, 2)
    output = attention.proj((weights @ values).transpose(1, 2).flatten(2))
    torch.testing.assert_close(output, said["y"], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("fused", [True, False])
def test_reading_changes_nothing(encoder, fused):
    set_fused_attention(encoder, fused=fused)
    images = torch.randn(2, 3, 12, 8)
    encoder.train()
    before = encoder(images)
    attention_weights(encoder, images)
    assert encoder.training
    assert not encoder.blocks[-1].attn._forward_pre_hooks
    torch.testing.assert_close(encoder(images), before, atol=0, rtol=0)


def test_maps_lie_as_the_patches_do():
    weights = torch.zeros(1, 1, 7, 7)
    weights[0, 0, :, 0] = 0.5
    weights[0, 0, 0, 4] = 0.5  # [CLS] looks at the fourth patch: second row, second of two columns
    weights[0, 0, 1:, 1] = 0.5
    assert attention_maps(weights, (3, 2))[0, 0].tolist() == [[0, 0], [0, 0.5], [0, 0]]
    assert attention_maps(weights, (3, 2), query="mean")[0, 0].tolist() == [[0.5, 0], [0, 0], [0, 0]]


def test_maps_of_several_class_tokens_are_their_mean():
    weights = torch.zeros(1, 1, 8, 8)
    weights[0, 0, 0, 2] = 1  # the first of two looks at the first patch
    weights[0, 0, 1, 7] = 0.5  # the second at the last, and at itself
    weights[0, 0, 1, 1] = 0.5
    weights[0, 0, 2:, 3] = 1
    assert attention_maps(weights, (3, 2))[0, 0].tolist() == [[0.5, 0], [0, 0], [0, 0.25]]
    assert attention_maps(weights, (3, 2), query="mean")[0, 0].tolist() == [[0, 1], [0, 0], [0, 0]]
