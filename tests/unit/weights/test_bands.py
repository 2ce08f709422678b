"""Weights that meet images of other bands: patch projection, normalization, what is said and refused."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers.encoders import encoder_file, info_of
from PIL import Image
from safetensors.torch import load_file
from timm.models._manipulate import adapt_input_conv
from torch import nn

import mae_vit
from mae_vit.core.bands import RGB8, Bands
from mae_vit.core.errors import InputError
from mae_vit.core.preprocessing import UNCHANGED
from mae_vit.finetuning.results import model_bytes, network_facts
from mae_vit.models.encoder_file import EncoderInfo, encoder_bytes, read_info, read_metadata
from mae_vit.models.encoders.base import adapt_patch_projection
from mae_vit.models.encoders.vit import ViTEncoder
from mae_vit.objectives.config import MAEConfig
from mae_vit.weights.feature_encoder import fit_bands
from mae_vit.weights.load import fit_normalization, load_weights
from mae_vit.weights.read import Weights, read_weights

FIVE = Bands(tuple("abcde"), "uint16", (0.0, 10.0, 20.0, 30.0, 40.0), (1000.0,) * 5, 7.0)
OF_FIVE = {"in_chans": 5, "mean": (0.1, 0.2, 0.3, 0.4, 0.5), "std": (0.2, 0.3, 0.4, 0.5, 0.6), "bands": FIVE}


def encoder_of(channels: int) -> ViTEncoder:
    return info_of(in_chans=channels).geometry.build()


@pytest.mark.parametrize("channels", [1, 4, 5, 13])
def test_channels_repeat_as_in_timm(channels):
    weight = torch.randn(8, 3, 4, 4)
    adapted, said = adapt_patch_projection(weight, channels)
    torch.testing.assert_close(adapted, adapt_input_conv(channels, weight.clone()))
    assert f"3 -> {channels}" in said


@pytest.mark.parametrize(("old", "channels"), [(3, 6), (13, 3), (4, 2)])
def test_images_of_equal_channels_keep_their_embedding(old, channels):
    """Only whole turns repeat each channel as often."""
    weight = torch.randn(8, old, 4, 4)
    adapted, _ = adapt_patch_projection(weight, channels)
    assert adapted.shape == (8, channels, 4, 4)
    torch.testing.assert_close(adapted.sum(dim=1), weight.sum(dim=1), atol=1e-5, rtol=1e-5)


def test_the_report_says_how_weights_were_adapted(tmp_path):
    path = encoder_file(tmp_path / "encoder.safetensors")
    weights, encoder = read_weights(str(path)), encoder_of(5)
    report = load_weights(weights, encoder)
    assert report.share == 1
    assert "3 -> 5 channels" in report.adapted["patch_embed.proj.weight"]
    expected, _ = adapt_patch_projection(weights.tensors["patch_embed.proj.weight"], 5)
    assert torch.equal(encoder.patch_embed.proj.weight, expected)
    assert "patch_embed.proj.weight" not in report.loaded + report.random + report.skipped


def test_raw_values_are_normalized_as_in_pretraining_in_another_scale():
    weights = Weights("START", {}, mean=OF_FIVE["mean"], std=OF_FIVE["std"], bands=FIVE)
    other = replace(FIVE, low=(5.0,) * 5, high=(500.0, 600.0, 700.0, 800.0, 900.0))
    fitted = fit_normalization(weights, other, 5)
    assert fitted is not None
    raw = torch.randint(0, 2000, (2, 5, 3, 3)).to(torch.uint16)

    def normalized(bands, mean, std):
        return (bands.unit(raw) - torch.tensor(mean).view(-1, 1, 1)) / torch.tensor(std).view(-1, 1, 1)

    torch.testing.assert_close(
        normalized(other, *fitted), normalized(FIVE, weights.mean, weights.std), atol=1e-4, rtol=1e-4
    )
    assert fit_normalization(weights, FIVE, 5) == (weights.mean, weights.std)
    for bands, channels in ((replace(FIVE, dtype="int16"), 5), (RGB8, 5), (FIVE, 3)):
        assert fit_normalization(weights, bands, channels) is None


def test_an_encoder_file_describes_its_bands_and_others_are_as_before(tmp_path):
    path = encoder_file(tmp_path / "encoder.safetensors", **OF_FIVE)
    info = read_info(path)
    assert isinstance(info, EncoderInfo)
    assert info.bands == FIVE == read_weights(str(path)).bands == mae_vit.load_encoder(path).info.bands
    assert b"bands" not in encoder_bytes(encoder_of(3), info_of())


@pytest.mark.parametrize(
    "broken",
    [
        {"low": (0.0,)},
        {"dtype": "object"},
        {"high": ("x",) * 5},
        {"low": (2000.0,) * 5},
        {"nodata": "none"},
        {"more": 1},
    ],
)
def test_damaged_descriptions_are_refused(broken):
    with pytest.raises((ValueError, TypeError)):
        Bands.of_entry({"bands": {**vars(FIVE), **broken}})


def test_features_of_raw_values_are_the_objectives(tmp_path):
    path = encoder_file(tmp_path / "encoder.safetensors", **OF_FIVE)
    encoder = mae_vit.load_encoder(path)
    raw = np.random.default_rng(0).integers(0, 1200, (5, 16, 16)).astype(np.uint16)
    raw[2, :5] = 7
    images = encoder.transform(raw)[None]
    mae = MAEConfig(name="mae", decoder_embed_dim=32, decoder_depth=1, decoder_num_heads=2).build(
        encoder.encoder, mean=OF_FIVE["mean"], std=OF_FIVE["std"], bands=FIVE
    )
    assert torch.equal(images, mae.normalize(torch.from_numpy(raw)[None]))
    assert (images[0, 2, :5] == 0).all()
    np.save(tmp_path / "image.npy", raw)
    assert torch.equal(encoder.transform(tmp_path / "image.npy"), images[0])
    for given, kind in (
        (raw.astype(np.uint8), r"uint8 \(5, 16, 16\)"),
        (raw[:2], r"uint16 \(2, 16, 16\)"),
        (Image.new("RGB", (8, 8)), "Image"),
    ):
        with pytest.raises(InputError, match=rf"uint16 \(5, H, W\).*{kind}$"):
            encoder.transform(given)


@pytest.mark.parametrize("ours", [True, False])
def test_the_file_of_a_fine_tuned_network_has_them(ours, tmp_path):
    facts = {name: OF_FIVE[name] for name in ("mean", "std", "bands")}
    data = SimpleNamespace(**facts, preprocessing=UNCHANGED)
    config = SimpleNamespace(model=SimpleNamespace(name="SmallResNet", image_hw=(16, 16)))
    info = info_of(in_chans=5, **facts) if ours else None
    held = info.geometry.build() if info else nn.Linear(2, 2)
    if info:
        held.network = nn.Linear(2, 2)  # as the part of a plug-in's encoder may be called
    metadata = network_facts(config, data, info)
    path = tmp_path / "model.safetensors"
    trained = nn.ModuleDict({"encoder" if ours else "network": held})
    path.write_bytes(model_bytes(trained, {**metadata, "segments": ["a", "b"]}))
    assert load_file(path).keys() == held.state_dict().keys()
    assert Bands.of_entry(read_metadata(path)) == FIVE
    assert read_metadata(path)["segments"] == ["a", "b"]


def test_data_of_other_bands_are_refused_with_both():
    ours, three = FIVE, replace(FIVE, names=tuple("abc"), low=(0.0,) * 3, high=(1.0,) * 3)
    assert fit_bands(RGB8, RGB8, "data") == RGB8
    assert fit_bands(ours, replace(FIVE, low=(1.0,) * 5, nodata=7), "data") == replace(FIVE, nodata=7)
    # Data that were prepared without a mark hold the same missing pixels.
    marked = replace(FIVE, nodata=7)
    assert fit_bands(marked, replace(FIVE, low=(1.0,) * 5, nodata=None), "data") == marked
    for bands, kind in ((RGB8, "8-bit"), (three, "3 bands of uint16")):
        with pytest.raises(InputError, match=f"^data.*{kind}.*5 bands of uint16"):
            fit_bands(ours, bands, "data")
