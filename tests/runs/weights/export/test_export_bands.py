"""Exports of an encoder of five bands: each is the same network, and its card reads raw values as `transform` does."""

import numpy as np
import pytest
import torch
from helpers.encoders import encoder_file
from helpers.export import close, export, run_card

import mae_vit
from mae_vit.core.bands import Bands

FIVE = Bands(("blue", "green", "red", "nir", "swir"), "uint16", (0.0, 1.0, 2.0, 3.0, 4.0), (900.0,) * 5, 7.0)
CHANGES = {"in_chans": 5, "mean": (0.1, 0.2, 0.3, 0.4, 0.5), "std": (0.2, 0.3, 0.4, 0.5, 0.6), "bands": FIVE}


@pytest.mark.parametrize(
    "to",
    [
        "timm",
        "official",
        "torch",
        pytest.param("hf", marks=pytest.mark.slow),
        pytest.param("onnx", marks=pytest.mark.slow),
    ],
)
def test_the_card_reads_raw_values_as_transform_does(tmp_path, monkeypatch, to):
    path, out = encoder_file(tmp_path / "encoder.safetensors", **CHANGES), tmp_path / "out"
    assert export(path, "--to", to, "--out", out) == 0
    raw = np.random.default_rng(0).integers(0, 1000, (5, 16, 20)).astype(np.uint16)
    raw[1, 3:6] = 7
    np.save(tmp_path / "image.npy", raw)
    card = (out / "README.md").read_text()
    for words in ("| nir | 3 | 900 | 0.4 | 0.5 |", "Missing values (7)", "uint16 (5, height, width)"):
        assert words in card
    found = run_card(out, monkeypatch)
    encoder = mae_vit.load_encoder(path)
    images = encoder.transform(raw)[None]
    torch.testing.assert_close(found["images"], images, atol=1e-5, rtol=1e-5)
    close(torch.as_tensor(found["features"]), encoder(images))
