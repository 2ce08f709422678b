"""Weights of others: whatever wraps and names them, the features are those of the network that was saved."""

import argparse
import json
import pickle
import re
from collections import defaultdict
from types import SimpleNamespace

import numpy as np
import pytest
import timm
import torch
import torchvision
import transformers
from helpers.weights.official_weights import RunsCode
from safetensors.torch import load_file, save_file

import mae_vit
from mae_vit.core.errors import InputError
from mae_vit.weights.encoder import info_from_weights
from mae_vit.weights.load import load_weights
from mae_vit.weights.read import read_weights

# A size of ours: its heads follow from width and depth.
WIDTH, DEPTH, HEADS = 128, 6, 4
SIZE = {"img_size": 32, "patch_size": 16, "embed_dim": WIDTH, "depth": DEPTH, "num_heads": HEADS}
THEIRS = {"image_size": 32, "patch_size": 16, "hidden_size": WIDTH, "intermediate_size": 4 * WIDTH}
THEIRS |= {"num_hidden_layers": DEPTH, "num_attention_heads": HEADS}
IMAGES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def network(seed=0, **options):
    torch.manual_seed(seed)
    model = timm.create_model("vit_tiny_patch16_224", num_classes=0, **{**SIZE, **options}).eval()
    with torch.no_grad():
        for value in model.parameters():
            # Biases and norms too: zeros and ones would hide a missing term.
            value.add_(0.02 * torch.randn_like(value))
    return model


def below(prefix, tensors):
    return {f"{prefix}{name}": value for name, value in tensors.items()}


def by_mmpretrain(tensors):
    renamed = {}
    for name, value in tensors.items():
        name = re.sub(r"\bnorm([12])", r"ln\1", re.sub(r"^norm\.", "ln1.", name))
        name = name.replace("mlp.fc1", "ffn.layers.0.0").replace("mlp.fc2", "ffn.layers.1")
        renamed[name.replace("blocks", "layers").replace("patch_embed.proj", "patch_embed.projection")] = (
            value
        )
    return renamed


def by_beit(tensors):
    """BEiT keeps biases of queries and values alone."""
    kept = {name: value for name, value in tensors.items() if not name.endswith("qkv.bias")}
    for number in range(DEPTH):
        bias = tensors[f"blocks.{number}.attn.qkv.bias"]
        bias[WIDTH : 2 * WIDTH] = 0
        kept[f"blocks.{number}.attn.q_bias"] = bias[:WIDTH]
        kept[f"blocks.{number}.attn.v_bias"] = bias[2 * WIDTH :]
    return kept


class Hyperparameters:
    """As OmegaConf's: a class that the restricted reader does not know."""

    def __init__(self):
        self.rate = 0.1


class AttributeDict(dict):
    """As Lightning's: a kind of dict that the restricted reader does not know."""


OPTIMIZER = {"state": {0: {"exp_avg": torch.zeros(3)}}, "param_groups": [{"lr": 0.1}]}
# What is saved of network 0, and of a network 1 that is not meant; and what the report says of it.
WRAPPED = {
    "plain": (lambda net, _: net, ""),
    "official MAE": (
        lambda net, _: {"model": {**net, "decoder_embed.weight": torch.zeros(4, 4)}},
        'below "model."',
    ),
    "DDP": (lambda net, _: {"model": below("module.", net), "optimizer": OPTIMIZER}, 'below "model.module."'),
    "compiled": (lambda net, _: below("_orig_mod.", net), ""),
    "compiled blocks": (
        lambda net, _: {k.replace("attn.", "_orig_mod.attn."): v for k, v in net.items()},
        "",
    ),
    "Lightning's own options": (
        lambda net, _: {
            "state_dict": below("model.", net),
            "hyper_parameters": AttributeDict(lr=1e-3),
            "callbacks": defaultdict(list, best=[np.float64(1.0), Hyperparameters()]),
        },
        'below "state_dict.model."',
    ),
    "DINO": (
        lambda net, other: {
            "student": below("module.backbone.", other),
            "teacher": {**below("backbone.", net), "head.mlp.0.weight": torch.zeros(4, WIDTH)},
            "args": argparse.Namespace(arch="vit_tiny"),
        },
        "chosen over student.module.backbone",
    ),
    "MoCo v3": (
        lambda net, other: {
            "state_dict": below("module.base_encoder.", net) | below("module.momentum_encoder.", other)
        },
        "chosen over state_dict.module.momentum_encoder",
    ),
    "EMA": (lambda net, other: {"model": other, "model_ema": net}, 'below "model_ema."; chosen over model '),
    "mmpretrain": (
        lambda net, _: {"meta": {"epoch": 3}, "state_dict": below("backbone.", by_mmpretrain(net))},
        "by the names of mmpretrain",
    ),
    "BEiT of the same function": (lambda net, _: {"model": by_beit(net)}, ""),
}


@pytest.mark.parametrize("kind", WRAPPED)
def test_a_network_is_found_in_any_wrapper(tmp_path, kind):
    model, other = network(0), network(1)
    wrap, said = WRAPPED[kind]
    torch.save(wrap(model.state_dict(), other.state_dict()), tmp_path / "some.pth")
    encoder = mae_vit.load_encoder(tmp_path / "some.pth")
    with torch.no_grad():
        torch.testing.assert_close(encoder(IMAGES), model(IMAGES), atol=1e-5, rtol=0)
    assert load_weights(encoder.weights, encoder.encoder).share == 1
    report = load_weights(encoder.weights, encoder.encoder).describe("some.pth")
    assert said in report
    assert ("  found  " in report) == bool(encoder.weights.remarks)


SLIP = argparse.Namespace(model="SLIP_VITS16")
TIMM = {"architecture": "vit_small_patch16_224", "model_args": {"num_heads": 8}}
# What is saved of a network of 384 x 12 below "visual.", what lies beside it, and its heads.
SMALL = {
    "MoCo v3": ({"arch": "vit_small"}, {}, 12),
    "mmpretrain": ({"meta": {"cfg": "backbone=dict(arch='mocov3-small', patch_size=16)"}}, {}, 12),
    "SLIP": ({"args": SLIP}, {}, 12),
    "DINO": ({"args": argparse.Namespace(arch="vit_small")}, {}, None),
    "timm": ({"arch": "vit_small_patch16_224"}, {}, 6),
    "another's": ({"arch": "resnet50"}, {}, None),
    "a config beside it": ({"arch": "vit_small"}, TIMM, 8),
}


@pytest.mark.parametrize("kind", SMALL)
def test_a_file_says_its_heads_by_its_architecture(tmp_path, kind):
    facts, beside, heads = SMALL[kind]
    with torch.device("meta"):
        shapes = timm.create_model("vit_small_patch16_224", img_size=32, num_classes=0).state_dict()
    tensors = {name: torch.zeros(value.shape) for name, value in shapes.items()}
    torch.save({"state_dict": below("visual.", tensors), **facts}, tmp_path / "some.pth")
    (tmp_path / "config.json").write_text(json.dumps(beside))
    weights = read_weights(str(tmp_path / "some.pth"))
    assert weights.num_heads == heads
    assert weights.mean is None  # which a name does not tell
    assert info_from_weights(weights).vit.num_heads == (heads or 6)


def randomized(model):
    torch.manual_seed(0)
    with torch.no_grad():
        for value in model.parameters():
            value.copy_(0.05 * torch.randn_like(value))
    return model.eval()


def of_transformers(name, **options):
    config = getattr(transformers, f"{name}Config")(**THEIRS, **options)
    return randomized(getattr(transformers, f"{name}Model")(config))


SMALL_DECODER = {"decoder_hidden_size": 16, "decoder_num_hidden_layers": 1, "decoder_num_attention_heads": 2}
TRANSFORMERS = {
    "ViT": (lambda: of_transformers("ViT"), {}),
    "ViT without bias": (lambda: of_transformers("ViT", qkv_bias=False), {}),
    "Pixio": (lambda: of_transformers("Pixio"), {}),
    # As they come: in the order of the noise, with which nothing is masked.
    "ViTMAE": (
        lambda: of_transformers("ViTMAE", mask_ratio=0.0, **SMALL_DECODER),
        {"noise": torch.arange(4.0).repeat(2, 1)},
    ),
}


@pytest.mark.parametrize(
    ("kind", "form"),
    [
        *(
            ("ViT", "safetensors"),
            ("ViT", "in memory"),
            ("ViT without bias", "in a trainer"),
            ("ViTMAE", "bin"),
        ),
        *(("Pixio", "safetensors"), ("Pixio", "in memory")),
    ],
)
def test_models_of_transformers(tmp_path, kind, form):
    build, options = TRANSFORMERS[kind]
    model = build()
    with torch.no_grad():
        tokens = model(IMAGES, **options).last_hidden_state
    count = 8 if kind == "Pixio" else 1
    expected = tokens[:, :count].mean(dim=1)
    path = tmp_path
    if form in ("safetensors", "bin"):
        model.save_pretrained(tmp_path)
        preprocessor = {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.2, 0.3, 0.4]}
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(preprocessor))
        if form == "bin":
            file = tmp_path / "model.safetensors"
            torch.save(load_file(file), tmp_path / "pytorch_model.bin")
            file.unlink()
    else:
        path = tmp_path / "saved.pt"
        state = model.state_dict()
        torch.save(state if form == "in memory" else {"state_dict": below("net.vit.", state)}, path)
    encoder = mae_vit.load_encoder(path)
    with torch.no_grad():
        torch.testing.assert_close(encoder(IMAGES), expected, atol=1e-5, rtol=0)
    assert "transformers" in encoder.weights.remarks["found"]
    assert encoder.info.vit.class_tokens == count
    if form in ("safetensors", "bin"):
        assert encoder.info.mean == (0.5, 0.4, 0.3)


def test_a_model_of_torchvision(tmp_path):
    model = torchvision.models.VisionTransformer(
        image_size=32, patch_size=16, num_layers=DEPTH, num_heads=HEADS, hidden_dim=WIDTH, mlp_dim=4 * WIDTH
    )
    torch.save(randomized(model).state_dict(), tmp_path / "vit.pth")
    encoder = mae_vit.load_encoder(tmp_path / "vit.pth")
    head = [encoder.weights.tensors[f"head.{kind}"] for kind in ("weight", "bias")]
    with torch.no_grad():
        logits = torch.nn.functional.linear(encoder(IMAGES), *head)
        torch.testing.assert_close(logits, model(IMAGES), atol=1e-5, rtol=0)


@pytest.mark.parametrize("before", [False, True])
def test_a_head_beside_the_network_is_a_head_unless_it_has_another_layer(tmp_path, before):
    head = {"head.layers.head.weight": torch.ones(3, WIDTH), "head.layers.head.bias": torch.ones(3)}
    head |= {"head.layers.pre_logits.weight": torch.ones(WIDTH, WIDTH)} if before else {}
    state = below("backbone.", by_mmpretrain(network().state_dict())) | head
    torch.save({"state_dict": state}, tmp_path / "some.pth")
    assert ("head.weight" in read_weights(str(tmp_path / "some.pth")).tensors) != before


# What computes something else.
REFUSED = {
    "DINOv2": lambda: of_transformers("Dinov2").state_dict(),
    "BEiT": lambda: of_transformers("Beit").state_dict(),
    "distilled": lambda: of_transformers("DeiT").state_dict(),
    "layer scale": lambda: network(init_values=0.1).state_dict(),
    "registers": lambda: network(reg_tokens=4).state_dict(),
    "no class token": lambda: network(class_token=False, global_pool="avg").state_dict(),
    "norm before": lambda: network(pre_norm=True).state_dict(),
    "norm of queries": lambda: network(qk_norm=True).state_dict(),
    "a CNN": lambda: timm.create_model("resnet18").state_dict(),
    "of several dates": lambda: {
        **network().state_dict(),
        "patch_embed.proj.weight": torch.zeros(8, 6, 3, 4, 4),
    },
    "two": lambda: below("left.", network().state_dict()) | below("right.", network().state_dict()),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_computes_something_else_is_refused_by_name(tmp_path, kind, said):
    torch.save({"model": REFUSED[kind]()}, tmp_path / "some.pth")
    with pytest.raises(InputError) as error:
        mae_vit.load_encoder(tmp_path / "some.pth")
    said(error)


@pytest.mark.parametrize(
    "config",
    [
        *({**THEIRS, "hidden_act": "quick_gelu"}, {**THEIRS, "layer_norm_eps": 1e-5}),
        {"architecture": "vit_base_patch32_clip_quickgelu_224"},
        *({"architecture": "vit_tiny_patch16_224", "model_args": {"num_heads": n}} for n in (0, 3, "4", [4])),
        {"architecture": "vit_tiny_patch16_224", "model_args": {"act_layer": "silu"}},
    ],
)
def test_the_config_beside_tells_what_shapes_do_not(tmp_path, config, said):
    save_file(network().state_dict(), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError) as error:
        mae_vit.load_encoder(tmp_path)
    said(error)


@pytest.mark.parametrize("size", [(32, 128), (64, 128), (192, 224)])
def test_the_config_beside_tells_the_size(tmp_path, size):
    """2 x 8 and 12 x 14 patches could be those of a square, with and without the class token's row."""
    stated = {"architecture": "vit_tiny_patch16_224", "model_args": {**SIZE, "img_size": size}}
    beside = {"timm": stated, "transformers": {**THEIRS, "image_size": size}, "nothing": {}}
    model, images = network(img_size=size), torch.randn(2, 3, *size)
    for kind, config in beside.items():
        (tmp_path / kind).mkdir()
        save_file(model.state_dict(), tmp_path / kind / "model.safetensors")
        (tmp_path / kind / "config.json").write_text(json.dumps(config))
        if config:
            encoder = mae_vit.load_encoder(tmp_path / kind)
            assert encoder.info.img_size == size
            torch.testing.assert_close(encoder(images), model(images), atol=1e-5, rtol=0)
            assert "pos_embed" in load_weights(encoder.weights, encoder.info.geometry.build()).loaded
    if size == (64, 128):
        with pytest.raises(InputError, match=re.escape('config.json next to it: {"architecture"')):
            mae_vit.load_encoder(tmp_path / "nothing")
        damaged = {**THEIRS, "image_size": [64, 64]}
        (tmp_path / "transformers" / "config.json").write_text(json.dumps(damaged))
        with pytest.raises(InputError, match="do not fit the 4 x 4 patches"):
            mae_vit.load_encoder(tmp_path / "transformers")


def test_one_of_several_networks_is_taken_by_its_name(tmp_path, capsys):
    student, teacher = network(0), network(1)
    path = tmp_path / "dino.pth"
    torch.save({"student": below("module.", student.state_dict()), "teacher": teacher.state_dict()}, path)
    with torch.no_grad():
        for name, model in (("", teacher), ("@teacher", teacher), ("@student", student)):
            encoder = mae_vit.load_encoder(f"{path}{name}")
            torch.testing.assert_close(encoder(IMAGES), model(IMAGES), atol=1e-5, rtol=0)
            assert encoder.weights.source == f"{path}{name}"
            other = "teacher" if name == "@student" else "student.module"
            assert f"over {other}" in capsys.readouterr().err
    with pytest.raises(InputError, match=r"'nobody'.* student\.module, teacher"):
        mae_vit.load_encoder(f"{path}@nobody")


def test_objects_beside_the_weights_are_never_called(tmp_path):
    model, path = network(), tmp_path / "some.ckpt"
    mark = tmp_path / "mark"
    # As a module in a notebook of another person.
    Hyperparameters.__module__ = "elsewhere"
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(
                __import__("sys").modules, "elsewhere", SimpleNamespace(Hyperparameters=Hyperparameters)
            )
            torch.save(
                {"state_dict": model.state_dict(), "a": Hyperparameters(), "b": RunsCode(str(mark))}, path
            )
    finally:
        Hyperparameters.__module__ = __name__
    assert read_weights(str(path)).tensors.keys() == model.state_dict().keys()
    path.write_bytes(pickle.dumps(RunsCode(str(mark))))
    with pytest.raises(InputError, match=r"some\.ckpt"):
        read_weights(str(path))
    assert not mark.exists()
    torch.save(model, path)
    with pytest.raises(InputError, match=r"some\.ckpt.*state_dict"):
        read_weights(str(path))
