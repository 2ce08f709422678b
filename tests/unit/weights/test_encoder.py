"""The encoder as others use it: from any start, images in, features out."""

import io
from dataclasses import replace

import numpy as np
import pytest
import timm
import torch
from helpers.commands import ROOT
from helpers.encoders import vit_info
from PIL import Image

import mae_vit
from mae_vit.core.errors import InputError
from mae_vit.finetuning.config.pretrained import WeightsOverrides
from mae_vit.models.encoder_file import encoder_bytes
from mae_vit.weights.read import read_weights

INFO = vit_info(
    "tiny-cifar", (32, 32), 4, 3, 128, 2, 4, 4.0, "learnable", (0.4, 0.5, 0.6), (0.2, 0.3, 0.4), "mae", 7
)


@pytest.fixture
def path(tmp_path):
    torch.manual_seed(0)
    path = tmp_path / "encoder.safetensors"
    path.write_bytes(encoder_bytes(INFO.geometry.build(), INFO))
    return path


def picture(height=40, width=60):
    return np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)


def test_features_are_timms_of_the_same_images(path):
    encoder = mae_vit.load_encoder(path)
    images = torch.stack([encoder.transform(picture()), encoder.transform(picture(32, 32))])
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=32, patch_size=4, embed_dim=128, depth=2, num_heads=4, num_classes=0
    ).eval()
    model.load_state_dict(encoder.encoder.state_dict(), strict=True)
    with torch.no_grad():
        tokens = model.forward_features(images)
        torch.testing.assert_close(encoder(images), tokens[:, 1:].mean(dim=1), atol=1e-5, rtol=0)
        by_cls = mae_vit.load_encoder(path, pool="cls")(images)
        torch.testing.assert_close(by_cls, tokens[:, 0], atol=1e-5, rtol=0)
    assert encoder(images).shape == (2, encoder.embed_dim)


def test_an_image_is_the_same_as_path_bytes_pil_and_array(path, tmp_path):
    encoder, pixels = mae_vit.load_encoder(path), picture()
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "PNG")
    file = tmp_path / "image.png"
    file.write_bytes(stream.getvalue())
    kinds = [file, str(file), stream.getvalue(), Image.fromarray(pixels), pixels]
    transformed = [encoder.transform(kind) for kind in kinds]
    assert transformed[0].shape == (3, 32, 32)
    assert all(torch.equal(image, transformed[0]) for image in transformed)
    # Centered: the middle 40 x 40 of 40 x 60 pixels.
    assert torch.equal(encoder.transform(pixels[:, 10:50]), transformed[0])
    gray = encoder.crop(np.full((32, 32), 51, np.uint8))
    mean, std = torch.tensor(INFO.mean), torch.tensor(INFO.std)
    expected = (0.2 - mean) / std
    torch.testing.assert_close(
        encoder.normalize(torch.from_numpy(gray)[None])[0, :, 0, 0], expected, atol=1e-6, rtol=0
    )


def test_sixteen_bits_are_the_same_as_path_and_pil(path, tmp_path):
    """Pillow's own conversion makes nearly all of them white."""
    ramp = np.linspace(0, 65535, 32 * 32).astype(np.uint16).reshape(32, 32)
    Image.fromarray(ramp).save(tmp_path / "deep.png")
    image = Image.open(tmp_path / "deep.png")
    assert image.mode.startswith("I")
    encoder = mae_vit.load_encoder(path)
    assert torch.equal(encoder.transform(image), encoder.transform(tmp_path / "deep.png"))
    expected = np.repeat((ramp >> 8).astype(np.uint8)[..., None], 3, axis=2)
    assert torch.equal(encoder.transform(image), encoder.transform(expected))


@pytest.mark.parametrize("images", ["a.png", torch.zeros(1, 3, 32, 32, dtype=torch.uint8)])
def test_what_no_transform_has_made_is_refused(path, images):
    with pytest.raises(ValueError, match="transform"):
        mae_vit.load_encoder(path)(images)


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
    for start, pool in {**expected, included: "mean"}.items():
        assert read_weights(str(start)).pool == pool
        source = ROOT / "configs" / "finetune" / "finetune_cifar_tiny.yaml"
        for stated, taken in (({}, pool), ({"pool": "cls"}, "cls"), ({"mode": "segment"}, None)):
            raw = {"finetune": dict(stated)}
            WeightsOverrides(str(start), source)(raw)
            assert raw["finetune"].get("pool") == taken


def test_an_unknown_pool_is_refused(path):
    with pytest.raises(InputError, match='pool="max"'):
        mae_vit.load_encoder(path, pool="max")


def test_another_size_interpolates_positions(path):
    encoder = mae_vit.load_encoder(path, img_size=(48, 32))
    assert encoder.encoder.grid_size == (12, 8)
    assert encoder(encoder.transform(picture())[None]).shape == (1, 128)
    with pytest.raises(InputError, match=r"img_size=34.*patch_size=4.*32"):
        mae_vit.load_encoder(path, img_size=34)


def test_an_official_file_says_its_geometry_by_its_shapes(tmp_path):
    info = vit_info("tiny-cifar", (64, 64), 16, 3, 128, 6, 4, 4.0, "sincos", (0.5,) * 3, (0.5,) * 3, "mae", 0)
    torch.manual_seed(0)
    encoder = info.geometry.build().eval()
    path = tmp_path / "mae_pretrain.pth"
    torch.save({"model": encoder.state_dict()}, path)
    loaded = mae_vit.load_encoder(path)
    assert (loaded.info.vit.size, loaded.info.img_size, loaded.info.vit.num_heads) == (
        "tiny-cifar",
        (64, 64),
        4,
    )
    assert loaded.info.vit.pos_embed == "sincos"
    assert loaded.info.mean == (0.485, 0.456, 0.406)
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        assert torch.equal(loaded(images), encoder.forward_features(images)[:, 0])


def test_a_network_without_known_heads_is_refused(tmp_path):
    path = tmp_path / "odd.pth"
    info = vit_info("S", (32, 32), 8, 3, 100, 2, 5, 4.0, "learnable", (0.5,) * 3, (0.5,) * 3, "mae", 0)
    torch.save({"model": info.geometry.build().state_dict()}, path)
    with pytest.raises(InputError, match="heads"):
        mae_vit.load_encoder(path)


def test_images_of_another_size_are_refused(path):
    encoder = mae_vit.load_encoder(path)
    with pytest.raises(ValueError, match=r"\(B, 3, 32, 32\).*img_size="):
        encoder(torch.zeros(1, 3, 36, 32))


def test_a_home_folder_is_expanded(path, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    Image.fromarray(picture()).save(tmp_path / "a.png")
    encoder = mae_vit.load_encoder(path)
    assert torch.equal(encoder.transform("~/a.png"), encoder.transform(tmp_path / "a.png"))


def closed(file):
    image = Image.open(file)
    image.close()
    return image


def broken(file):
    file.write_bytes(b"\xff\xd8\xff\xe0broken")
    return file


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda _: "https://key@example.org/a.png", r"^https://example\.org/a\.png: "),
        (closed, "closed before"),
        (broken, r"a\.png cannot be decoded"),
        (lambda file: file.with_name("none.jpg"), r"none\.jpg: no such file"),
        (lambda _: torch.rand(3, 8, 8).requires_grad_(), r"float32 \(3, 8, 8\)"),
        (lambda _: Image.new("L", (32, 32), 200).convert("I"), 'mode "I"'),
    ],
)
def test_what_cannot_be_read_is_one_line(path, tmp_path, make, expected):
    Image.fromarray(picture()).save(tmp_path / "a.png")
    with pytest.raises(InputError, match=expected):
        mae_vit.load_encoder(path).transform(make(tmp_path / "a.png"))


@pytest.mark.parametrize(("highest", "dark"), [(4095, True), (65535, False)])
def test_deep_images_are_warned_of_once(path, tmp_path, capsys, highest, dark):
    encoder = mae_vit.load_encoder(path)
    for name in ("a.png", "b.png"):
        Image.fromarray(np.linspace(0, highest, 1600).astype(np.uint16).reshape(40, 40)).save(tmp_path / name)
        encoder.transform(tmp_path / name)
        encoder.transform(Image.open(tmp_path / name))
    warned = capsys.readouterr().err
    assert (warned.count("warning:"), "black" in warned) == (1, dark)


def test_the_package_has_no_other_names():
    with pytest.raises(AttributeError):
        mae_vit.nothing  # noqa: B018
