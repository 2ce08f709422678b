"""Photographs as the camera wrote them, prepared upright and smaller: every command reads them as training did."""

import json

import numpy as np
import pytest
from helpers.commands import SMALL_MAE
from helpers.images import encoded, picture, write_files
from PIL import Image
from safetensors import safe_open

import mae_vit
from mae_vit.cli.main import main
from mae_vit.data.index import open_index
from mae_vit.inspection.images import draw_samples
from mae_vit.models.encoder_file import read_info
from mae_vit.pretraining.command import main as pretrain_main

DONE = {"exif_orientation": "apply", "quality": 90, "resize": 20}


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Photographs of two classes, which a camera wrote sideways, and the data prepared of them."""
    folder = tmp_path_factory.mktemp("camera")
    exif = Image.Exif()
    exif[274] = 6
    pictures = {f"{'ab'[n % 2]}/{n}.jpg": encoded(picture(n, (60, 40)), exif=exif) for n in range(24)}
    write_files(folder / "photos", pictures)
    options = ["--exif-orientation", "apply", "--resize", "20", "--holdout", "1/3", "--workers", "0"]
    assert main(["prepare", str(folder / "photos"), str(folder / "data"), *options]) == 0
    return folder / "photos", folder / "data"


def rows_of(path) -> dict[str, float]:
    lines = [line.split(",") for line in path.read_text().splitlines()]
    key = lines[0].index("key")
    value = lines[0].index("probability" if "probability" in lines[0] else "confidence")
    return {line[key]: float(line[value]) for line in lines[1:]}


@pytest.mark.parametrize("network", ["vit", "cnn"])
def test_predictions(call, photos, tmp_path, network):
    small = {"config": "simple_cnn_cifar", "model": ["model.img_size=8"]}
    options = ["data.augment.crop=random_resized", "train.effective_batch_size=8"]
    options += ["train.precision=fp32", "model.in_chans=3"]
    assert call(f"data.path={photos[1]}", *options, **(small if network == "cnn" else {})) == 0
    own, found = rows_of(tmp_path / "run" / "predictions.csv"), []
    for source in photos:
        out = tmp_path / f"{len(found)}.csv"
        assert main(["predict", str(tmp_path / "run"), str(source), "--out", str(out), "--workers", "0"]) == 0
        found.append(rows_of(out))
    assert (len(own), len(found[0])) == (8, 24)
    assert found[0] == pytest.approx(found[1], abs=1e-6)
    assert own == pytest.approx({key: found[0][key] for key in own}, abs=2e-5)
    with safe_open(tmp_path / "run" / "model.safetensors", "pt") as file:
        assert json.loads(file.metadata()["mae_vit"])["preprocessing"] == DONE


def test_features_and_pictures(photos, tmp_path):
    run = tmp_path / "run"
    short = ["train.engine=torch", "train.steps=2", "train.warmup_steps=1", "train.effective_batch_size=8"]
    short += ["train.precision=fp32", "monitor.tensorboard=false", "data.augment.crop=random_resized"]
    place = [f"data.path={photos[1]}", f"run.dir={run}", "run.name=run"]
    assert pretrain_main(["--config", "mae_digits", *SMALL_MAE, "model.in_chans=3", *short, *place]) == 0
    info = read_info(run / "encoder.safetensors")
    assert info.preprocessing.to_entry() == {"preprocessing": DONE}
    read = mae_vit.load_encoder(run)
    assert "step-00000002" in read.weights.source
    assert read.info.preprocessing == info.preprocessing
    features, drawn = [], []
    for source in photos:
        out = tmp_path / f"features-{len(features)}"
        assert main(["embed", str(run), str(source), "--out", str(out), "--workers", "0"]) == 0
        keys, rows = (out / "keys.txt").read_text().splitlines(), np.load(out / "features.npy")
        features.append(dict(zip(keys, rows.tolist(), strict=True)))
        assert json.loads((out / "meta.json").read_text())["preprocessing"] == DONE
        pictures = draw_samples(str(source), count=24, encoder=info, split="train" if drawn else None)
        drawn.append({picture.tobytes() for picture in pictures.images.numpy()})
    assert features[0].keys() == features[1].keys()
    for key, feature in features[0].items():
        assert feature == pytest.approx(features[1][key], abs=1e-5)
    assert len(drawn[1]) == len(open_index(photos[1], "train"))
    assert drawn[1] <= drawn[0]
    upright = mae_vit.load_encoder(run).crop(photos[0] / "a" / "0.jpg")
    with Image.open(photos[0] / "a" / "0.jpg") as image:
        turned = np.asarray(image.convert("RGB").rotate(-90, expand=True))
    assert np.abs(upright - mae_vit.load_encoder(run).crop(turned).astype(float)).mean() < 5
