"""Values that the data call missing are missing to the encoder that is looked at."""

from dataclasses import replace

import torch
from helpers.encoders import encoder_file

from mae_vit.core.bands import Bands
from mae_vit.inspection import inspect
from mae_vit.inspection.images import Samples


def test_the_encoder_reads_the_missing_values_of_the_data(tmp_path, monkeypatch):
    bands = Bands(names=("a", "b"), dtype="int16", low=(0.0, 0.0), high=(1000.0, 1000.0))
    facts = {"in_chans": 2, "bands": bands, "mean": (0.5, 0.5), "std": (0.2, 0.2)}
    path = encoder_file(tmp_path / "encoder.safetensors", **facts)
    images = torch.full((2, 2, 16, 16), 900, dtype=torch.int16)
    images[:, :, :4] = -9999
    samples = Samples(images, "here", bands=replace(bands, nodata=-9999.0))
    lowest = []

    def write_views(subject, drawn, *_):
        lowest.append(subject.model.normalize(drawn.images).min().item())
        return []

    monkeypatch.setattr(inspect, "draw_samples", lambda *_, **__: samples)
    monkeypatch.setattr(inspect, "_write_views", write_views)
    options = {"images": 2, "split": None, "device": torch.device("cpu")}
    inspect.inspect([str(path)], "here", tmp_path / "out", **options)
    assert lowest == [0]
