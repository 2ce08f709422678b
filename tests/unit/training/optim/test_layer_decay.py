"""Layer-wise decay: rates worked out by hand, taken by the optimizer, on every engine alike."""

import pytest
import torch

from mae_vit.core.batch import Batch
from mae_vit.core.keyed_rng import SampleKeys
from mae_vit.finetuning.models.classifiers import ViTClassifier
from mae_vit.models.encoders.vit import ViTEncoder
from mae_vit.objectives.label_loss import LabelLoss
from mae_vit.runtime.ranks import Ranks
from mae_vit.training.engines.base import StepOptions
from mae_vit.training.engines.torch_engine import TorchEngine
from mae_vit.training.optim import EMBEDDINGS, OptimizerOptions, decay_groups, layer_rates, layer_scales


def model_of(depth: int = 3, pool: str = "mean") -> ViTClassifier:
    torch.manual_seed(0)
    encoder = ViTEncoder(img_size=(8, 8), patch_size=4, in_chans=1, embed_dim=8, depth=depth, num_heads=2)
    return ViTClassifier(encoder, pool=pool, head_init="small", mean=[0.5], std=[0.2], labels=LabelLoss(3))


def test_rates_by_hand():
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


def test_the_table_adds_up():
    model = model_of()
    rows = layer_rates(model, 0.5, 2e-3)
    assert [row.layer for row in rows] == ["embeddings", "block 1", "block 2", "block 3", "norm and head"]
    assert [row.lr for row in rows] == [1.25e-4, 2.5e-4, 5e-4, 1e-3, 2e-3]
    assert sum(row.parameters for row in rows) == sum(p.numel() for p in model.parameters())


def test_groups_are_merged_and_complete():
    model = model_of()
    groups = decay_groups(model, 0.05, exempt=EMBEDDINGS, lr_scales=layer_scales(model, 0.5))
    keys = [(group["lr_scale"], group["weight_decay"]) for group in groups]
    assert len(keys) == len(set(keys)) == 5 * 2
    names = [name for group in groups for name in group["names"]]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())
    decayed = {name for group in groups if group["weight_decay"] for name in group["names"]}
    assert "encoder.patch_embed.proj.weight" in decayed
    assert not decayed & {"encoder.cls_token", "encoder.pos_embed", "head.bias", "fc_norm.weight"}


def test_a_parameter_of_no_layer_is_an_error():
    model = model_of()
    model.encoder.stray = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"stray\.weight"):
        layer_scales(model, 0.5)


@pytest.mark.parametrize("layer_decay", [None, 0.5])
def test_rates_take_effect(layer_decay):
    """Adam's first step moves each number by its rate, whatever the gradient."""
    options = StepOptions(
        optimizer=OptimizerOptions("adam", 0.0, betas=[0.9, 0.999], layer_decay=layer_decay),
        clip_grad=None,
        precision="fp32",
        batch_size_per_device=4,
        accumulation=1,
    )
    engine = TorchEngine(model_of(), options, Ranks(), torch.device("cpu"))
    for group in engine._optimizer.param_groups:
        group["eps"] = 1e-30
    before = {name: p.detach().clone() for name, p in engine.objective.named_parameters()}
    index = torch.arange(4)
    images = torch.randint(
        0, 256, (4, 1, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    engine.backward(engine.forward(Batch(images, index % 3, SampleKeys(0, 0, index))).loss)
    engine.step(1e-2)
    scales = layer_scales(engine.objective, 0.5)
    for name, parameter in engine.objective.named_parameters():
        moved = (parameter - before[name]).abs().max().item()
        expected = 1e-2 * (scales[name] if layer_decay else 1)
        assert moved == pytest.approx(expected, rel=1e-3), name
