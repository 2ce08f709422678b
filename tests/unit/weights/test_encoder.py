"""The encoder as others use it: from any weights, images in, features out."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers.commands import ROOT
from helpers.encoders import info_of
from helpers.images import encoded
from PIL import Image
from safetensors.torch import load_file, save_file
from timm.layers import resample_abs_pos_embed

import mae_vit
from mae_vit.core.errors import InputError
from mae_vit.finetuning.config.pretrained import WeightsOverrides
from mae_vit.models.encoder_file import encoder_bytes, to_metadata
from mae_vit.models.geometry import NetworkGeometry
from mae_vit.weights.encoder import encoder_from_weights
from mae_vit.weights.read import Weights, read_weights

INFO = info_of(img_size=(32, 32), embed_dim=128, pos_embed="learnable")
PIXELS = np.random.default_rng(0).integers(0, 256, (40, 60, 3), dtype=np.uint8)
TENSOR = torch.from_numpy(PIXELS).permute(2, 0, 1)


@pytest.fixture
def path(tmp_path):
    torch.manual_seed(0)
    path = tmp_path / "encoder.safetensors"
    path.write_bytes(encoder_bytes(INFO.geometry.build(), INFO))
    return path


def test_a_photograph_is_taken_in_every_form(path, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    encoder, image = mae_vit.load_encoder(path), Image.fromarray(PIXELS)
    data, file = encoded(image, "png"), tmp_path / "a.png"
    file.write_bytes(data)
    expected = encoder.transform(data)
    assert expected.shape == (3, 32, 32)
    # The last is the middle of it, by which it is cropped.
    for given in (file, str(file), "~/a.png", image, PIXELS, TENSOR, PIXELS[:, 10:50]):
        assert torch.equal(encoder.transform(given), expected)
    gray = np.full((32, 32), 51, np.uint8)
    mean, std = torch.tensor(INFO.mean), torch.tensor(INFO.std)
    for given in (gray, torch.from_numpy(gray)[None]):
        torch.testing.assert_close(encoder.transform(given)[:, 0, 0], (0.2 - mean) / std, atol=1e-6, rtol=0)


def closed(file):
    image = Image.open(file)
    image.close()
    return image


def broken(file):
    file.write_bytes(b"\xff\xd8\xff\xe0broken")
    return file


@pytest.mark.parametrize(
    "image",
    [
        *("https://key@example.org/a.png", closed, broken, lambda file: file.with_name("none.jpg")),
        *(Image.new("I", (32, 32), 200), torch.rand(3, 8, 8).requires_grad_(), TENSOR[None], PIXELS / 255),
        *(TENSOR.numpy(), PIXELS[:0], None, [PIXELS]),
    ],
)
def test_what_cannot_be_read_is_one_line(path, tmp_path, image, said):
    Image.fromarray(PIXELS).save(tmp_path / "a.png")
    with pytest.raises(InputError) as error:
        mae_vit.load_encoder(path).transform(image(tmp_path / "a.png") if callable(image) else image)
    said(error)


@pytest.mark.parametrize(("highest", "dark"), [(4095, True), (65535, False)])
def test_deep_images_are_warned_of_once(path, tmp_path, capsys, highest, dark):
    encoder = mae_vit.load_encoder(path)
    for name in ("a.png", "b.png"):
        Image.fromarray(np.linspace(0, highest, 1600).astype(np.uint16).reshape(40, 40)).save(tmp_path / name)
        encoder.transform(tmp_path / name)
        encoder.transform(Image.open(tmp_path / name))
    warned = capsys.readouterr().err
    assert (warned.count("warning:"), "black" in warned) == (1, dark)


@pytest.mark.parametrize(
    "images", ["a.png", torch.zeros(1, 3, 32, 32, dtype=torch.uint8), torch.zeros(1, 3, 36, 32)]
)
def test_what_no_transform_has_made_is_refused(path, images, said):
    with pytest.raises(ValueError, match="transform") as error:
        mae_vit.load_encoder(path)(images)
    said(error)


def test_the_pooling_is_the_files_own(path, tmp_path):
    """Ours the mean unless the file says otherwise; others [CLS] unless they have a norm behind the mean."""
    encoder, cls = INFO.geometry.build(), tmp_path / "cls.safetensors"
    assert mae_vit.load_encoder(path).info.pool == "mean"
    assert b"pool" not in path.read_bytes()
    cls.write_bytes(encoder_bytes(encoder, replace(INFO, pool="cls")))
    norm = {f"fc_norm.{name}": value for name, value in encoder.norm.state_dict().items()}
    state = encoder.state_dict()
    for name, tensors in (("others", state), ("by_mean", {**state, **norm})):
        torch.save({"model": tensors}, tmp_path / f"{name}.pth")
    expected = {path: "mean", cls: "cls", tmp_path / "by_mean.pth": "mean", tmp_path / "others.pth": "cls"}
    included = ROOT / "docs/results/encoders/mae_cifar_tiny_100.safetensors"
    for weights, pool in {**expected, included: "mean"}.items():
        assert read_weights(str(weights)).pool == pool
        source = ROOT / "configs" / "finetune" / "finetune_cifar_tiny.yaml"
        for stated, taken in (({}, pool), ({"pool": "cls"}, "cls"), ({"mode": "segment"}, None)):
            raw = {"finetune": dict(stated)}
            WeightsOverrides(str(weights), source)(raw)
            assert raw["finetune"].get("pool") == taken


def test_another_size_interpolates_positions_and_odd_options_are_refused(path, said):
    encoder = mae_vit.load_encoder(path, img_size=(48, 32))
    assert encoder.encoder.grid_size == (12, 8)
    # Nothing trains it, so features are plain numbers.
    assert encoder(encoder.transform(PIXELS)[None]).numpy().shape == (1, encoder.embed_dim) == (1, 128)
    fixed = replace(INFO.geometry, pos_embed="sincos")
    path.write_bytes(encoder_bytes(fixed.build(), replace(INFO, geometry=fixed)))
    table = resample_abs_pos_embed(mae_vit.load_encoder(path).encoder.pos_embed, [12, 8], [8, 8])
    assert torch.equal(mae_vit.load_encoder(path, img_size=(48, 32)).encoder.pos_embed, table)
    assert mae_vit.load_encoder(path, img_size=np.int64(32)).info.img_size == (32, 32)
    for options in ({"img_size": 34}, {"img_size": "32"}, {"img_size": [64.0, 64.0]}, {"pool": "max"}):
        with pytest.raises(InputError) as error:
            mae_vit.load_encoder(path, **options)
        said(error)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("num_heads", 0), ("num_heads", 3), ("patch_size", 0), ("depth", "6"), ("std", [0, 1, 1])),
        *(("depth", 10**8), ("mean", [0.5, float("nan"), 0.5]), ("pool", "max")),
    ],
)
def test_damaged_metadata_are_one_line(path, key, value, said):
    save_file(load_file(path), path, metadata=to_metadata({**INFO.to_dict(), key: value}))
    with pytest.raises(InputError) as error:
        mae_vit.load_encoder(path)
    said(error)


def test_an_official_file_says_its_geometry_by_its_shapes(tmp_path):
    torch.manual_seed(0)
    encoder = info_of(img_size=(64, 64), patch_size=16, embed_dim=128, depth=6).geometry.build().eval()
    path = tmp_path / "mae_pretrain.pth"
    torch.save({"model": encoder.state_dict()}, path)
    loaded = mae_vit.load_encoder(path)
    vit = loaded.info.vit
    assert (vit.size, vit.img_size, vit.num_heads, vit.pos_embed) == ("tiny-cifar", (64, 64), 4, "sincos")
    assert loaded.info.mean == (0.485, 0.456, 0.406)
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        assert torch.equal(loaded(images), encoder.forward_features(images)[:, 0])
    odd = info_of(embed_dim=100, num_heads=5)
    torch.save({"model": odd.geometry.build().state_dict()}, path)
    with pytest.raises(InputError, match="heads"):
        mae_vit.load_encoder(path)


def test_a_norm_after_the_mean_is_kept_for_every_encoder():
    """Also for one without a final norm of its own, which a classifier of means has all the same."""
    geometry = NetworkGeometry((16, 16), 4, 3, "SmallResNet")
    encoder = geometry.build().eval()
    norm = {"fc_norm.weight": torch.rand(encoder.embed_dim), "fc_norm.bias": torch.rand(encoder.embed_dim)}
    facts = {"mean": (0.5,) * 3, "std": (0.2,) * 3, "geometry": geometry, "pool": "mean"}
    loaded = encoder_from_weights(Weights("x", {**encoder.weights(), **norm}, **facts))
    images = torch.randn(2, 3, 16, 16)
    mean = encoder.forward_features(images).mean(dim=1)
    expected = torch.nn.functional.layer_norm(mean, mean.shape[1:], *norm.values(), eps=1e-6)
    torch.testing.assert_close(loaded(images), expected)
    with pytest.raises(InputError, match="class token"):
        encoder_from_weights(Weights("x", encoder.weights(), **facts), pool="cls")


def test_the_package_has_no_other_names():
    with pytest.raises(AttributeError):
        mae_vit.nothing  # noqa: B018
