"""Networks of timm that ours cannot be: features and maps are timm's own, and what does not fit is one line."""

import json
import re
import shutil

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from helpers.embedding import call, encoded, read_output, write_encoder
from helpers.weights.backbones import KINDS, build, write_backbone, write_named
from safetensors.torch import load_file, save_file

import mae_vit
from mae_vit.core.errors import FetchUnavailable, InputError
from mae_vit.finetuning.models.classifiers import NetworkClassifier
from mae_vit.models.encoders.baselines import build_network
from mae_vit.models.encoders.network import NetworkEncoder
from mae_vit.objectives.label_loss import LabelLoss
from mae_vit.weights.names import FOREIGN_ORIGIN, name_of
from mae_vit.weights.read import read_weights

SMALLEST = "test_vit2"  # with layer scale
REPO = "timm/test_vit2.r160_in1k"


def images_of(side: int) -> torch.Tensor:
    return torch.randn(2, 3, side, side, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def smallest(tmp_path):
    """The file of a network that timm knows by name."""
    torch.manual_seed(0)
    network = timm.create_model(SMALLEST)
    path = tmp_path / "weights" / "model.safetensors"
    path.parent.mkdir()
    save_file(network.state_dict(), path)
    return path


@pytest.mark.parametrize("kind", KINDS)
def test_features_and_maps_are_timms(kind, tmp_path):
    """At the size of training and at another, with its positions or windows fitted by timm."""
    file = write_backbone(tmp_path, kind)
    own = KINDS[kind][2]
    for side in (own, 2 * own):
        encoder = mae_vit.load_encoder(file, img_size=None if side == own else side)
        assert encoder.input.img_size == (side, side)
        network, images = build(kind, side, file=file), images_of(side)
        with torch.no_grad():
            features, expected = encoder(images), network(images)
            torch.testing.assert_close(features, expected, rtol=0, atol=1e-6)
            assert features.shape == (2, encoder.num_features)
            assert features.std() > 0.01
            tokens, drawn = network.forward_features(images), encoder.patch_map(images)
            if kind == "convnext":  # the norm stands behind its pooling
                tokens = network.head.norm(tokens)
            tokens = network.fc_norm(tokens) if kind == "eva02" else tokens
        if tokens.ndim == 3:
            grid = network.patch_embed.grid_size
            tokens = tokens[:, network.num_prefix_tokens :].transpose(1, 2).unflatten(2, grid)
        elif kind == "swin":
            tokens = tokens.permute(0, 3, 1, 2)
        torch.testing.assert_close(drawn, tokens, rtol=0, atol=1e-6)


def test_the_map_of_ours_is_its_tokens(tmp_path):
    encoder = mae_vit.load_encoder(write_encoder(tmp_path / "encoder.safetensors"), img_size=(16, 24))
    images = torch.randn(2, 3, 16, 24)
    tokens, drawn = encoder.encoder.forward_features(images), encoder.patch_map(images)
    assert drawn.shape == (2, 24, 4, 6)
    assert torch.equal(drawn[1, :, 2, 3], tokens[1, 1 + 2 * 6 + 3])


@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear"])
def test_images_are_prepared_as_its_data_config_says(tmp_path, interpolation):
    encoder = mae_vit.load_encoder(write_backbone(tmp_path, "clip", interpolation=interpolation))
    pixels = np.random.default_rng(0).integers(0, 256, (100, 80, 3), dtype=np.uint8)
    box = torch.from_numpy(pixels[10:90].transpose(2, 0, 1).copy())[None]
    resized = F.interpolate(box, (64, 64), mode=interpolation, antialias=True)[0]
    facts = json.loads((tmp_path / "config.json").read_text())["pretrained_cfg"]
    mean, std = (torch.tensor(facts[name]).view(3, 1, 1) for name in ("mean", "std"))
    torch.testing.assert_close(encoder.transform(pixels), (resized / 255 - mean) / std)


def test_embed_writes_its_features_and_says_who_trained_it(tmp_path, capsys):
    file = write_backbone(tmp_path / "dinov2", "dinov2")
    for number in range(3):
        path = tmp_path / "images" / f"{number}.png"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(encoded(number, "png"))
    out = tmp_path / "features"
    assert call(file, tmp_path / "images", "--out", out) == 0
    output, network = read_output(out), build("dinov2", 28, file=file)
    encoder = mae_vit.load_encoder(file)
    images = torch.stack([encoder.transform(tmp_path / "images" / f"{number}.png") for number in range(3)])
    np.testing.assert_allclose(output["features"], network(images).detach().numpy(), rtol=0, atol=1e-6)
    facts = output["meta"]
    assert facts["origin"] == FOREIGN_ORIGIN
    assert (facts["network"], facts["pool"]) == ("timm:vit_small_patch14_reg4_dinov2", "token")
    assert call(file, tmp_path / "images", "--out", out, "--pool", "mean") == 2
    assert 'pool="mean"' in capsys.readouterr().err


def test_a_file_with_its_network_named_is_that_of_the_config_beside_it(smallest):
    named = mae_vit.load_encoder(f"timm:{SMALLEST}@{smallest}")
    (smallest.parent / "config.json").write_text(json.dumps({"architecture": SMALLEST}))
    images = torch.randn(2, 3, *named.input.img_size)
    torch.save(load_file(smallest), smallest.with_name("pytorch_model.bin"))
    for place in (smallest, smallest.parent, smallest.with_name("pytorch_model.bin")):
        beside = mae_vit.load_encoder(place, img_size=named.input.img_size)
        assert torch.equal(named(images), beside(images))
    assert name_of(f"timm:{SMALLEST}@{smallest}") == f"{SMALLEST}-weights"
    # As timm's training and the authors of networks write checkpoints; with an average it is what counts.
    tensors, trained = load_file(smallest), timm.create_model(SMALLEST).state_dict()
    for number, content in enumerate(
        [
            {"model": tensors, "epoch": 3},
            {"state_dict": {f"module.{name}": value for name, value in tensors.items()}},
            {
                "state_dict": trained,
                "state_dict_ema": tensors,
                "optimizer": {"state": {0: {"exp_avg": images}}},
            },
        ]
    ):
        torch.save(content, smallest.with_name(f"{number}.pth"))
        checkpoint = mae_vit.load_encoder(f"timm:{SMALLEST}@{smallest.with_name(f'{number}.pth')}")
        assert torch.equal(named(images), checkpoint(images))


def test_timms_weights_come_from_the_hub_and_then_from_its_cache(hub, smallest, monkeypatch):
    hub.add(REPO, {"model.safetensors": smallest.read_bytes()})
    fetched = mae_vit.load_encoder(f"timm:{SMALLEST}")
    hub.stop()
    local = mae_vit.load_encoder(f"timm:{SMALLEST}@{smallest}")
    images = torch.randn(2, 3, *local.input.img_size)
    assert torch.equal(fetched(images), local(images))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert torch.equal(mae_vit.load_encoder(f"timm:{SMALLEST}.r160_in1k")(images), local(images))


def test_without_a_network_one_line_says_how_to_get_the_file(hub, monkeypatch):
    hub.stop()
    by_hand = rf"hf download {REPO} .*timm:{SMALLEST}@DIR/model.safetensors"
    with pytest.raises(FetchUnavailable, match=by_hand):
        mae_vit.load_encoder(f"timm:{SMALLEST}")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(InputError, match=by_hand) as caught:
        mae_vit.load_encoder(f"timm:{SMALLEST}")
    assert "\n" not in str(caught.value)


def write_bad(folder, smallest):
    """Returns names of weights that cannot be measured."""
    cut, lone, odd = folder / "cut.safetensors", folder / "lone" / "a.safetensors", folder / "odd"
    cut.write_bytes(smallest.read_bytes()[:-100])
    pointer, int8 = folder / "pointer.safetensors", folder / "int8.safetensors"
    pointer.write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    save_file({name: value.to(torch.int8) for name, value in load_file(smallest).items()}, int8)
    lone.parent.mkdir()
    shutil.copy(smallest, lone)
    odd.mkdir()
    shutil.copy(smallest, odd / "model.safetensors")
    (odd / "config.json").write_text('{"architecture": "no_such_network"}')
    (folder / "weights.pth").write_bytes(b"x")
    missing = folder / "missing.safetensors"
    save_file(
        {name: value for name, value in load_file(smallest).items() if name != "fc_norm.weight"}, missing
    )
    named = f"timm:{SMALLEST}@"
    return [
        *("timm:vit_small_patch14_dinov", f"timm:{SMALLEST}.x", f"{folder}"),
        *(f"{smallest.parent}/model.safetensor", f"{named}{folder / 'weights.pth'}", f"{lone}"),
        *(f"{odd / 'model.safetensors'}", f"timm:test_resnet@{smallest}"),
        *(f"{named}{path}" for path in (cut, pointer, int8, missing)),
    ]


def test_what_does_not_fit_is_one_line(smallest, tmp_path, said):
    for weights in write_bad(tmp_path, smallest):
        with pytest.raises(InputError) as caught:
            mae_vit.load_encoder(weights)
        said(caught)
    assert "fc_norm.weight" in str(caught.value)
    with pytest.raises(InputError, match="150x150 px"):
        mae_vit.load_encoder(f"timm:{SMALLEST}@{smallest}", img_size=150)


def test_a_size_is_only_to_be_left_out_if_one_was_given(smallest):
    """Here the file's own config has a size that the network does not take."""
    config = {"input_size": [3, 96, 96], "fixed_input_size": False}
    facts = {"architecture": SMALLEST, "pretrained_cfg": config, "model_args": {"dynamic_img_size": False}}
    (smallest.parent / "config.json").write_text(json.dumps(facts))
    with pytest.raises(InputError, match="96x96 px") as caught:
        mae_vit.load_encoder(smallest)
    assert "img_size" not in str(caught.value)
    with pytest.raises(InputError, match=r"112x112 px.*img_size"):
        mae_vit.load_encoder(smallest, img_size=112)


@pytest.mark.parametrize("name", ["test_vit2", "test_resnet"])
def test_a_file_of_another_kind_is_read_once_its_network_is_named(tmp_path, name):
    path = tmp_path / "some.safetensors"
    save_file(timm.create_model(name).state_dict(), path)
    with pytest.raises(InputError, match="timm:NAME@") as caught:
        mae_vit.load_encoder(path)
    (weights,) = re.findall(r'"(timm:NAME@[^"]+)"', str(caught.value))
    assert mae_vit.load_encoder(weights.replace("NAME", name)).num_features > 0
    (tmp_path / "config.json").write_text(json.dumps({"architecture": name}))
    assert mae_vit.load_encoder(path).num_features > 0


def test_a_folder_that_timm_writes_is_the_network_of_that_name(tmp_path):
    """It states arguments that change nothing, too."""
    torch.manual_seed(0)
    model = timm.create_model("test_convnext")
    timm.models.save_for_hf(model, tmp_path / "own", safe_serialization=True)
    assert json.loads((tmp_path / "own" / "config.json").read_text())["model_args"]
    weights = read_weights(str(tmp_path / "own"))
    named = read_weights(f"timm:test_convnext@{tmp_path / 'own'}")
    assert weights.fitted((32, 32), 3).tensors.keys() == named.fitted((32, 32), 3).tensors.keys()
    assert (weights.digest, weights.network.images) == (named.digest, named.network.images)


def test_the_heads_of_a_distilled_network_are_new(tmp_path):
    name = "deit_tiny_distilled_patch16_224"
    weights = read_weights(write_named(name, tmp_path)).fitted((32, 32), 3)
    network = build_network(f"timm:{name}", num_classes=2, in_chans=3, img_size=(32, 32))
    report = NetworkClassifier(network, mean=[0.5] * 3, std=[0.5] * 3, labels=LabelLoss(2)).load(weights)
    assert (report.share, report.random) == (1, [])


def test_channels_come_last_in_a_norm_behind_the_pooling():
    encoder = NetworkEncoder("timm:test_mambaout", img_size=(64, 64), patch_size=1, in_chans=3)
    images = images_of(64)
    with torch.no_grad():
        network = encoder.eval().network
        expected = network.head.norm(network.forward_features(images))
        torch.testing.assert_close(encoder.feature_map(images), expected.movedim(-1, 1))


def test_a_network_of_our_kind_has_the_facts_of_its_name(tmp_path):
    weights = read_weights(write_named("test_vit", tmp_path))
    known = timm.get_pretrained_cfg("test_vit")
    assert weights.network is None
    assert (weights.mean, weights.std, weights.pool) == (known.mean, known.std, "cls")
    assert weights.img_size == (160, 160)
    with pytest.raises(InputError, match=r"is not of timm:vit_base_patch16_224: .* is \["):
        read_weights(f"timm:vit_base_patch16_224@{weights.path}")
