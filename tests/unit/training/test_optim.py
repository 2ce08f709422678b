"""Rates, groups of parameters and optimizers by number, worked out by hand."""

import math

import pytest
import torch
from torch import nn

from mae_vit.core.batch import Batch
from mae_vit.core.errors import InputError
from mae_vit.core.keyed_rng import SampleKeys
from mae_vit.finetuning.models.classifiers import ViTClassifier
from mae_vit.models.encoders.vit import ViTEncoder
from mae_vit.objectives.label_loss import LabelLoss
from mae_vit.runtime.ranks import Ranks
from mae_vit.training.engines.base import StepOptions
from mae_vit.training.engines.state import LossScale
from mae_vit.training.engines.torch_engine import TorchEngine
from mae_vit.training.muon import orthogonalize
from mae_vit.training.optim import (
    EMBEDDINGS,
    OptimizerOptions,
    decay_groups,
    layer_scales,
    lr_at,
    make_optimizer,
)


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
    assert lr_at(0, peak_lr=2.0, warmup_steps=0, total_steps=5) == 2.0


def test_every_trainable_parameter_is_in_one_group():
    size = {"img_size": (16, 16), "patch_size": 4, "embed_dim": 32, "depth": 1, "num_heads": 2}
    encoder = ViTEncoder(**size, pos_embed="sincos")
    decayed, kept = decay_groups(encoder, 0.05)
    assert (decayed["weight_decay"], kept["weight_decay"]) == (0.05, 0.0)
    names = {id(p): name for name, p in encoder.named_parameters() if p.requires_grad}
    assert "pos_embed" not in names.values()  # fixed
    decayed, kept = ([names.pop(id(p)) for p in group["params"]] for group in (decayed, kept))
    assert not names
    # As in the official pretraining code, [CLS] decays; biases and norms do not.
    assert {"cls_token", "patch_embed.proj.weight", "blocks.0.attn.qkv.weight"} <= set(decayed)
    assert {"blocks.0.norm1.weight", "blocks.0.attn.qkv.bias", "norm.bias"} <= set(kept)


def model_of(depth: int = 3, pool: str = "mean") -> ViTClassifier:
    torch.manual_seed(0)
    encoder = ViTEncoder(img_size=(8, 8), patch_size=4, in_chans=1, embed_dim=8, depth=depth, num_heads=2)
    return ViTClassifier(encoder, pool=pool, head_init="small", mean=[0.5], std=[0.2], labels=LabelLoss(3))


def test_rates_of_layers_by_hand():
    # Three blocks and the head: four steps of decay between head and embeddings.
    scales = layer_scales(model_of(), 0.5)
    assert scales["head.weight"] == scales["head.bias"] == scales["fc_norm.weight"] == 1
    assert scales["encoder.blocks.2.mlp.fc2.bias"] == 0.5
    assert scales["encoder.blocks.1.attn.qkv.weight"] == 0.25
    assert scales["encoder.blocks.0.norm1.weight"] == 0.125
    for name in ("cls_token", "pos_embed", "patch_embed.proj.weight", "patch_embed.proj.bias"):
        assert scales[f"encoder.{name}"] == 0.0625
    assert layer_scales(model_of(pool="cls"), 0.5)["encoder.norm.weight"] == 1
    # MAE Table 9, ViT-B: 0.65 over 13 layers.
    assert layer_scales(model_of(12), 0.65)["encoder.cls_token"] == pytest.approx(0.65**13)
    stray = model_of()
    stray.encoder.stray = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"stray\.weight"):
        layer_scales(stray, 0.5)


def test_groups_are_merged_and_complete():
    model = model_of()
    groups = decay_groups(model, 0.05, exempt=EMBEDDINGS, lr_scales=layer_scales(model, 0.5))
    keys = [(group["lr_scale"], group["weight_decay"]) for group in groups]
    assert len(keys) == len(set(keys)) == 5 * 2
    names = {id(p): name for name, p in model.named_parameters()}
    decays = [(names.pop(id(p)), group["weight_decay"]) for group in groups for p in group["params"]]
    assert not names
    decayed = {name for name, decay in decays if decay}
    assert "encoder.patch_embed.proj.weight" in decayed
    assert not decayed & {"encoder.cls_token", "encoder.pos_embed", "head.bias", "fc_norm.weight"}


@pytest.mark.parametrize("layer_decay", [None, 0.5])
def test_rates_take_effect(layer_decay):
    """Adam's first step moves each number by its rate, whatever the gradient."""
    adam = OptimizerOptions("adam", 0.0, betas=[0.9, 0.999], layer_decay=layer_decay)
    engine = TorchEngine(model_of(), StepOptions(adam, None, "fp32", 4, 1), Ranks(), torch.device("cpu"))
    for group in engine._optimizer.param_groups:
        group["eps"] = 1e-30
    before = {name: p.detach().clone() for name, p in engine.objective.named_parameters()}
    generator, index = torch.Generator().manual_seed(0), torch.arange(4)
    images = torch.randint(0, 256, (4, 1, 8, 8), dtype=torch.uint8, generator=generator)
    engine.backward(engine.forward(Batch(images, index % 3, SampleKeys(0, 0, index))).loss)
    engine.step(1e-2)
    scales = layer_scales(engine.objective, 0.5)
    for name, parameter in engine.objective.named_parameters():
        moved = (parameter - before[name]).abs().max().item()
        assert moved == pytest.approx(1e-2 * (scales[name] if layer_decay else 1), rel=1e-3), name


def test_lars_without_decay_is_that_of_mae():
    """The first step of the official util/lars.py, written out: no adaptation of 1-D parameters."""
    torch.manual_seed(0)
    layer = nn.Linear(3, 2)
    optimizer = make_optimizer(layer, OptimizerOptions("lars", 0.0, momentum=0.9))
    weight, bias = (parameter.detach().clone() for parameter in layer.parameters())
    layer.weight.grad, layer.bias.grad = torch.randn(2, 3), torch.randn(2)
    for group in optimizer.param_groups:
        group["lr"] = 0.1
    optimizer.step()
    adapted = layer.weight.grad * (0.001 * weight.norm() / layer.weight.grad.norm())
    torch.testing.assert_close(layer.weight.detach(), weight - 0.1 * adapted)
    torch.testing.assert_close(layer.bias.detach(), bias - 0.1 * layer.bias.grad)


def test_the_loss_scale_halves_doubles_counts_and_has_bounds():
    scale = LossScale(scale=8.0, growth_interval=2)
    for overflow, expected in (
        (True, (4.0, 0, 1)),
        (False, (4.0, 1, 1)),
        (False, (8.0, 0, 1)),
        (False, (8.0, 1, 1)),
        (True, (4.0, 0, 2)),
    ):
        assert scale.update(overflow=overflow) == overflow
        assert (scale.scale, scale.good_steps, scale.skipped_steps) == expected
    scale = LossScale(scale=2.0, growth_interval=1)
    assert scale.update(overflow=True)
    # Nothing left to try: the step counts as bad.
    assert not scale.update(overflow=True)
    assert (scale.scale, scale.skipped_steps) == (LossScale.LOWEST, 1)
    for _ in range(40):
        scale.update(overflow=False)
    assert scale.scale == LossScale.HIGHEST


@pytest.mark.parametrize("shape", [(5, 3), (3, 5), (4, 4)])
def test_muon_moves_a_matrix_along_all_its_directions(shape):
    matrices = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0))
    found = orthogonalize(matrices, torch.float32)
    left, _, right = torch.linalg.svd(matrices, full_matrices=False)
    along = torch.diagonal(left.mT @ found @ right.mT, dim1=-2, dim2=-1)
    assert ((along > 0.9) & (along < 1.1)).all()
    torch.testing.assert_close(found, left @ torch.diag_embed(along) @ right, atol=1e-5, rtol=0)
    half = orthogonalize(matrices, torch.bfloat16)
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), found, atol=0.1, rtol=0)


def test_muon_needs_blocks(said):
    with pytest.raises(InputError) as error:
        make_optimizer(nn.Linear(3, 2), OptimizerOptions("muon", 0.0))
    said(error)
