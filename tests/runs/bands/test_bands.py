"""From files of 13 bands of uint16 to an encoder and further: values survive, in a small run and in a larger one.

The tiles are mixtures of photographs' colors (docs/tools/mix_bands.py): real structure, no measurements.
"""

import itertools
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers.commands import ROOT, SMALL_MAE, lines_of, one_line
from PIL import Image
from sklearn.datasets import load_sample_images

import mae_vit
from mae_vit.cli.main import main
from mae_vit.config.load import read_run_config
from mae_vit.finetuning.command import main as finetune
from mae_vit.inspection.images import draw_samples
from mae_vit.inspection.inspect import open_subject
from mae_vit.inspection.views import band_views
from mae_vit.pretraining.command import main as pretrain
from mae_vit.training.engines.cost import MetaStep

sys.path.insert(0, str(ROOT / "docs" / "tools"))
import mix_bands

CONFIG = str(ROOT / "configs" / "pretrain" / "mae_satellite.yaml")
SIDE = 32
SMALL = [*SMALL_MAE, "model.img_size=32", "train.epochs=null", "train.warmup_epochs=null", "train.steps=4"]
SMALL += ["train.warmup_steps=1", "train.effective_batch_size=16", "train.precision=fp32"]
SMALL += ["monitor.tensorboard=false", "monitor.evaluate_every_steps=4", "monitor.log_every_steps=1"]
FEW = ["train.effective_batch_size=16", "data.augment.policy=none"]


def write_tiles(folder: Path, count: int) -> list[np.ndarray]:
    """Cuts tiles out of two photographs, a class each."""
    photos = [image.transpose(2, 0, 1) for image in load_sample_images().images]
    rng, tiles = np.random.default_rng(0), []
    for number in range(count):
        photo = photos[number % 2]
        top, left = (int(rng.integers(0, side - SIDE)) for side in photo.shape[1:])
        tile = mix_bands.mix(photo[:, top : top + SIDE, left : left + SIDE], rng)
        stem = folder / ("china", "flower")[number % 2] / f"{number:05d}"
        stem.parent.mkdir(parents=True, exist_ok=True)
        mix_bands.write(stem, tile)
        tiles.append(tile)
    return tiles


@pytest.fixture(scope="module")
def tiles(tmp_path_factory) -> tuple[Path, list[np.ndarray]]:
    folder = tmp_path_factory.mktemp("bands")
    drawn = write_tiles(folder / "tiles", 60)
    assert main(["prepare", str(folder / "tiles"), str(folder / "data"), "--holdout", "0.25"]) == 0
    return folder, drawn


@pytest.fixture(scope="module")
def trained(tiles, tmp_path_factory) -> Path:
    run = tmp_path_factory.mktemp("run") / "mae"
    assert pretrain(["--config", CONFIG, f"data.path={tiles[0] / 'data'}", f"run.dir={run}", *SMALL]) == 0
    return run


def test_a_run_takes_the_bands_of_the_data(tiles, trained):
    folder, _ = tiles
    table = json.loads((folder / "data" / "dataset.json").read_text())["bands"]
    assert tuple(table["names"]) == tuple(mix_bands.SATELLITE)
    assert table["nodata"] == mix_bands.NODATA
    assert read_run_config(trained)["model"]["in_chans"] == 13
    info = mae_vit.load_encoder(trained).info
    assert (info.bands.names, info.bands.dtype) == (tuple(mix_bands.SATELLITE), "uint16")
    assert info.bands.low == tuple(table["scale"]["low"])
    assert all(np.isfinite(line["loss"]) for line in lines_of(trained) if line.get("loss") is not None)
    # A held-out picture: four rows of labels and tiles.
    assert len(list((trained / "pictures").glob("*.png"))) == 1


def test_pictures_have_the_range_and_the_scale_of_each_band(trained, tiles):
    """Black is the low end and white the high one, in images and in reconstructions; missing values are black."""
    folder, written = tiles
    subject = open_subject(str(trained))
    samples = draw_samples(str(folder / "data"), count=16, encoder=subject.model.info, split="val")
    views = {view.name: view for view in band_views(subject.objective, samples)}
    bands, raw = subject.model.info.bands, samples.images.numpy()
    assert views.keys() == {"bands", "reconstructions-bands"}
    assert f"B8A {bands.low[8]:g} to {bands.high[8]:g}" in views["bands"].reading
    assert {image.tobytes() for image in raw} <= {tile.tobytes() for tile in written}
    low, high = (np.array(ends)[:, None, None] for ends in (bands.low, bands.high))
    unit = np.where(raw == mix_bands.NODATA, 0, ((raw - low) / (high - low)).clip(0, 1))
    large = F.interpolate(torch.from_numpy(unit), (96, 96), mode="nearest-exact").numpy() * 255
    for name, position, images in (
        ("bands", lambda image, band: (band, image), range(4)),
        # One image, whose last row is the original.
        ("reconstructions-bands", lambda image, band: (-1, band), range(1)),
    ):
        drawn = views[name].drawn
        assert drawn.std() > 0
        for image, band in itertools.product(images, range(13)):
            row, column = position(image, band)
            # A row is a label of 14 px and a tile with a frame of 1 px.
            top = row % (len(drawn) // 112) * 112 + 15
            shown = drawn[top : top + 96, column * 98 + 1 : column * 98 + 97, 0]
            np.testing.assert_allclose(shown.astype(int), large[image, band], atol=1.01)


def test_the_plan_counts_the_bands_of_the_data(tiles, trained, monkeypatch):
    """Trials of the doctor take such images, and the plan holds 13 values of 2 bytes a pixel."""
    asked, whole = [], MetaStep.estimate
    monkeypatch.setattr(MetaStep, "estimate", lambda step, **k: asked.append(step) or whole(step, **k))
    place = f"data.path={tiles[0] / 'data'}"
    assert pretrain(["--config", CONFIG, place, *SMALL, "--dry-run"]) == 0
    assert finetune(["--ckpt", str(trained), place, "finetune.pool=mean", *FEW, "--dry-run"]) == 0
    assert {(step.image_shape[0], step.dtype) for step in asked} == {(13, torch.uint16)}
    assert len(asked) >= 2


@pytest.mark.slow
def test_inspection_draws_a_page_of_bands(tiles, trained, tmp_path):
    out, data = tmp_path / "inspect", str(tiles[0] / "data")
    assert main(["inspect", str(trained), "--data", data, "--images", "15", "--out", str(out)]) == 0
    for name in ("bands", "reconstructions-bands", "reconstructions-random", "attention-rollout"):
        assert np.asarray(Image.open(out / f"{name}.png")).std() > 0
    page = (out / "index.html").read_text()
    assert "B8A" in page
    assert "uint16" in page


def test_embed_export_and_fine_tuning_take_bands(tiles, trained, tmp_path, capsys):
    folder, drawn = tiles
    data = str(folder / "data")
    assert main(["embed", str(trained), data, "--out", str(tmp_path / "f")]) == 0
    features = np.load(tmp_path / "f" / "features.npy")
    assert features.shape == (60, 16)
    encoder = mae_vit.load_encoder(trained)
    ours = encoder(torch.stack([encoder.transform(tile) for tile in drawn])).detach().numpy()
    # Shards have their own order.
    distances = np.abs(features[:, None] - ours[None]).max(axis=2)
    assert distances.min(axis=1).max() < 1e-4
    assert main(["export", str(trained), "--to", "timm", "--out", str(tmp_path / "timm")]) == 0
    assert (
        json.loads((tmp_path / "timm" / "config.json").read_text())["pretrained_cfg"]["input_size"][0] == 13
    )
    options = ["finetune.mode=few_shot", f"data.path={data}", f"run.dir={tmp_path / 'few'}", *FEW]
    assert finetune(["--ckpt", str(trained), "--config", str(ROOT / "configs/finetune/finetune_cifar_tiny.yaml"),
                     *options]) == 0  # fmt: skip
    capsys.readouterr()
    wrong = [
        "--config",
        CONFIG,
        f"data.path={data}",
        f"run.dir={tmp_path / 'no'}",
        *SMALL,
        "model.in_chans=3",
    ]
    assert pretrain(wrong) == 2
    assert "model.in_chans=3, " in one_line(capsys)
    unknown = [*wrong[:-1], "monitor.picture_bands=[B4, B03, B02]"]
    assert pretrain(unknown) == 2
    assert 'did you mean "B04"' in one_line(capsys)


def test_weights_of_photographs_are_adapted(tiles, tmp_path, capsys):
    photographs = ROOT / "docs/results/encoders/mae_cifar_tiny_100.safetensors"
    options = [f"data.path={tiles[0] / 'data'}", f"run.dir={tmp_path / 'run'}", *FEW]
    config = ["--config", str(ROOT / "configs/finetune/finetune_cifar_tiny.yaml"), "--ckpt", str(photographs)]
    assert finetune([*config, *options, "finetune.mode=few_shot"]) == 0
    said = capsys.readouterr().out
    assert "patch_embed.proj.weight (3 -> 13 channels, repeated in turn, times 3/13)" in said
    assert "model.in_chans=13, " in said
    assert read_run_config(tmp_path / "run")["data"]["normalize"] == "dataset"
