"""The weights file of a fine-tuned network says what raw values mean."""

from types import SimpleNamespace

import pytest
from helpers.export import info_of
from torch import nn

from mae_vit.core.bands import Bands
from mae_vit.core.preprocessing import UNCHANGED
from mae_vit.finetuning.results import model_bytes, network_facts
from mae_vit.models.encoder_file import read_metadata

TWO = Bands(("red", "nir"), "uint16", (0.0, 10.0), (4000.0, 5000.0), nodata=0)


@pytest.mark.parametrize("ours", [True, False])
def test_bands_are_in_the_file(ours, tmp_path):
    data = SimpleNamespace(mean=(0.1, 0.2), std=(0.3, 0.4), bands=TWO, preprocessing=UNCHANGED)
    config = SimpleNamespace(model=SimpleNamespace(name="SmallResNet", image_hw=(16, 16)))
    info = info_of(in_chans=2, mean=data.mean, std=data.std, bands=TWO) if ours else None
    network = nn.ModuleDict({"encoder" if ours else "network": nn.Linear(2, 2)})
    path = tmp_path / "model.safetensors"
    path.write_bytes(model_bytes(network, {**network_facts(config, data, info), "segments": ["a", "b"]}))
    metadata = read_metadata(path)
    assert Bands.of_entry(metadata) == TWO
    assert metadata["segments"] == ["a", "b"]
