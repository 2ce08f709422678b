"""Rates and parameter groups by number."""

import math

import pytest

from mae_vit.models.encoders.vit import ViTEncoder
from mae_vit.training.optim import decay_groups, lr_at


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (0, 0.0),
        (5, 0.5),
        (10, 1.0),
        (35, 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 4))),
        (60, 0.55),
        (109, 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * 0.99))),
    ],
)
def test_warmup_and_cosine(step, expected):
    lr = lr_at(step, peak_lr=1.0, warmup_steps=10, total_steps=110, min_lr=0.1)
    assert lr == pytest.approx(expected, rel=1e-12)


def test_no_warmup_starts_at_the_peak():
    assert lr_at(0, peak_lr=2.0, warmup_steps=0, total_steps=5) == 2.0


def test_every_trainable_parameter_is_in_one_group():
    encoder = ViTEncoder(
        img_size=(16, 16), patch_size=4, embed_dim=32, depth=1, num_heads=2, pos_embed="sincos"
    )
    decayed, kept = decay_groups(encoder, 0.05)
    assert (decayed["weight_decay"], kept["weight_decay"]) == (0.05, 0.0)
    names = decayed["names"] + kept["names"]
    assert len(names) == len(set(names))
    assert set(names) == {name for name, p in encoder.named_parameters() if p.requires_grad}
    assert "pos_embed" not in names  # fixed
    # As in the official pretraining code, [CLS] decays; biases and norms do not.
    assert {"cls_token", "patch_embed.proj.weight", "blocks.0.attn.qkv.weight"} <= set(decayed["names"])
    assert {"blocks.0.norm1.weight", "blocks.0.attn.qkv.bias", "norm.bias"} <= set(kept["names"])
