"""`mae-vit predict`: a run's classifier gives new images what the run itself gave its test images."""

import csv
import json
import math
from collections import Counter

import numpy as np
import pytest
import torch
from helpers.commands import ROOT
from helpers.finetune import SMALL, TINY
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import mae_vit
from mae_vit.cli.main import main
from mae_vit.core.errors import InputError
from mae_vit.data.index import open_index
from mae_vit.finetuning.command import main as finetune


def rows_of(path) -> list[dict]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def predict(run, data, out, *words) -> int:
    return main(["predict", str(run), str(data), "--out", str(out), "--workers", "0", *map(str, words)])


NETWORKS = {
    "mean": ["finetune.pool=mean"],
    "cls": ["finetune.pool=cls"],
    "SimpleCNN": [],
    "distilled": ["finetune.pool=cls", "finetune.distillation=hard"],
    "fixed positions": ["model.pos_embed=sincos"],
}


@pytest.mark.parametrize("network", NETWORKS)
def test_predictions_of_test_images_are_those_of_the_run(call, digits, tmp_path, capsys, network):
    options = list(NETWORKS[network])
    if network == "distilled":
        assert call(name="teacher") == 0
        options.append(f"finetune.teacher={tmp_path / 'teacher'}")
    if network == "SimpleCNN":
        small = ["model.img_size=8", "model.in_chans=1"]
        assert call(*options, config="simple_cnn_cifar", model=small) == 0
    else:
        assert call(*options) == 0
    capsys.readouterr()
    assert predict(tmp_path / "run", digits, tmp_path / "p.csv", "--split", "test", "--top", 2) == 0
    said = capsys.readouterr().out
    ours, theirs = rows_of(tmp_path / "p.csv"), rows_of(tmp_path / "run" / "predictions.csv")
    assert len(ours) == len(theirs) == 300
    known = {row["key"]: row for row in theirs}
    for row in ours:
        run = known[row["key"]]
        assert (row["label"], row["prediction"]) == (run["label"], run["prediction"])
        assert float(row["probability"]) == pytest.approx(float(run["confidence"]), abs=2e-5)
        assert float(row["probability_2"]) <= float(row["probability"])
        assert row["prediction_2"] != row["prediction"]
    right = sum(row["label"] == row["prediction"] for row in ours)
    assert f"accuracy {right / 300:.2%} of 300 images with a class of the run as label" in said
    assert {row["split"] for row in ours} == {"test"}
    assert f"{tmp_path / 'p.csv'}: predictions of 300 images" in said


def test_a_folder_of_images_with_a_broken_one(call, digits, tmp_path, capsys):
    assert call() == 0
    photos = tmp_path / "photos"
    photos.mkdir()
    for number in range(3):
        pixels = np.random.default_rng(number).integers(0, 256, (20, 30), dtype=np.uint8)
        Image.fromarray(pixels).save(photos / f"{number}.png")
    (photos / "broken.png").write_bytes(b"none")
    capsys.readouterr()
    assert predict(tmp_path / "run" / "model.safetensors", photos, tmp_path / "p.csv") == 0
    out, _ = capsys.readouterr()
    assert "passed over 1 broken image" in out
    assert "accuracy" not in out
    rows = rows_of(tmp_path / "p.csv")
    assert [row["path"] for row in rows] == ["0.png", "1.png", "2.png"]
    assert list(rows[0]) == ["path", "key", "prediction", "probability"]
    assert [row["path"] for row in rows_of(tmp_path / "p.csv.broken.csv")] == ["broken.png"]

    classifier = mae_vit.load_classifier(tmp_path / "run")
    assert classifier.classes == tuple(open_index(digits, "test").dataset.classes)
    (chances,) = classifier.predict(classifier.transform(photos / "1.png")[None])
    assert chances.sum().item() == pytest.approx(1)
    assert classifier.classes[int(chances.argmax())] == rows[1]["prediction"]
    assert chances.max().item() == pytest.approx(float(rows[1]["probability"]), abs=1e-5)
    with pytest.raises(TypeError, match="use load_encoder"):
        classifier.patch_map(torch.zeros(1, 1, 8, 8))
    with pytest.raises(InputError, match=r'cannot read rum: .*did you mean ".*/run"'):
        mae_vit.load_classifier(tmp_path / "rum")
    (tmp_path / "unfinished").mkdir()
    with pytest.raises(InputError, match=r"\(give the folder of a finished fine-tuning run\)$"):
        mae_vit.load_classifier(tmp_path / "unfinished")
    (tmp_path / "pretrained").mkdir()
    (tmp_path / "pretrained" / "encoder.safetensors").touch()
    with pytest.raises(
        InputError, match="a run of pretraining has no classes; fine-tune it first: mae-vit fine"
    ):
        mae_vit.load_classifier(tmp_path / "pretrained")


def test_of_prepared_data_the_images_that_were_trained_on_are_named(call, digits, tmp_path, capsys):
    assert call() == 0
    capsys.readouterr()
    assert predict(tmp_path / "run", digits, tmp_path / "p.csv") == 0
    said = "note: the accuracy includes images that the network was trained on; give --split test"
    assert said in capsys.readouterr().err
    rows = rows_of(tmp_path / "p.csv")
    assert Counter(row["split"] for row in rows) == {"train": 1497, "test": 300}
    assert predict(tmp_path / "run", digits, tmp_path / "p.csv", "--split", "test") == 0
    assert said not in capsys.readouterr().err


def test_bands_of_16_bits(tmp_path):
    rng, tiles = np.random.default_rng(0), tmp_path / "data"
    for number in range(24):
        path = tmp_path / "tiles" / ("land", "water")[number % 2] / f"{number}.npy"
        path.parent.mkdir(parents=True, exist_ok=True)
        np.save(path, rng.integers(9 * number, 20_000, (4, 16, 16)).astype(np.uint16))
    assert main(["prepare", str(tmp_path / "tiles"), str(tiles), "--holdout", "0.25"]) == 0
    config = [
        "--config",
        str(ROOT / "configs" / "finetune" / "simple_cnn_cifar.yaml"),
        *SMALL,
        f"data.path={tiles}",
    ]
    options = ["model.img_size=16", "train.effective_batch_size=8", f"run.dir={tmp_path / 'run'}"]
    assert finetune([*config, *options]) == 0
    assert predict(tmp_path / "run", tiles, tmp_path / "p.csv", "--split", "val") == 0
    known = {row["key"]: row for row in rows_of(tmp_path / "run" / "predictions.csv")}
    rows = rows_of(tmp_path / "p.csv")
    assert len(rows) == len(known) > 3
    for row in rows:
        assert row["prediction"] == known[row["key"]]["prediction"]
        assert float(row["probability"]) == pytest.approx(float(known[row["key"]]["confidence"]), abs=2e-5)


def test_some_labels_are_classes_of_the_run(call, tmp_path, capsys):
    assert call() == 0
    for name in ("3", "owl"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        Image.new("L", (9, 9), 90).save(tmp_path / "photos" / name / "1.png")
    capsys.readouterr()
    assert predict(tmp_path / "run", tmp_path / "photos", tmp_path / "p.csv") == 0
    out, error = capsys.readouterr()
    assert "of 1 image with a class of the run as label" in out
    assert "note: 1 image with other labels (owl), which are no classes of the run, are not compared" in error


def test_labels_of_other_classes_are_kept_and_not_compared(call, tmp_path, capsys):
    assert call() == 0
    for name in ("cat", "owl"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        Image.new("L", (9, 9), 90).save(tmp_path / "photos" / name / "1.png")
    capsys.readouterr()
    assert predict(tmp_path / "run", tmp_path / "photos", tmp_path / "p.csv") == 0
    out, error = capsys.readouterr()
    assert "accuracy" not in out
    assert "note: 2 images with other labels (cat, owl), which are no classes of the run" in error
    assert [row["label"] for row in rows_of(tmp_path / "p.csv")] == ["cat", "owl"]
    assert predict(tmp_path / "run", tmp_path / "photos", tmp_path / "q.csv", "--no-labels") == 0
    assert "label" not in rows_of(tmp_path / "q.csv")[0]


def test_bad_input_is_one_line_and_leaves_nothing(call, pretrained, digits, tmp_path, capsys):
    assert call() == 0
    run, out = tmp_path / "run", tmp_path / "p.csv"
    cases = {
        "the predictions are a .csv file": (run, digits, tmp_path / "p.npz"),
        "1 to 10, the run's classes": (run, digits, out, "--top", 11),
        "at least 1": (run, digits, out, "--batch-size", 0),
        "give the folder of a finished fine-tuning run": (tmp_path / "none", digits, out),
        "is not the model.safetensors": (pretrained / "encoder.safetensors", digits, out),
        'no split "tst"': (run, digits, out, "--split", "tst"),
        "does not exist; known: cifar10": (run, tmp_path / "none", tmp_path / "new" / "p.csv"),
    }
    before = sorted(path.name for path in tmp_path.iterdir())
    for said, words in cases.items():
        capsys.readouterr()
        assert predict(*words) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("mae-vit: error: ")
        assert said in line
        assert sorted(path.name for path in tmp_path.iterdir()) == before


HOSTILE = {
    "no pixels": {"img_size": [0, 0]},
    "negative": {"img_size": [-4, -4]},
    "no whole patches": {"img_size": [9, 9]},
    "huge": {"img_size": [10**9, 10**9]},
    "too large to index": {"img_size": [10**30, 10**30]},
    "many blocks": {"depth": 10**8},
    "a large table": {"img_size": [8000, 8000], "pos_embed": "sincos"},
    "two means": {"mean": [0.5, 0.5], "std": [0.2, 0.2]},
    "not a number": {"std": [math.nan]},
    "bands that it has not": {
        "bands": {"names": ["a", "b"], "low": [0, 0], "high": [1, 1], "dtype": "uint16"}
    },
    "codes of a terminal": {"classes": ["\x1b[31mred\x07", *"abcdefghi"]},
    "a lone surrogate": {"classes": ["\ud800", *"abcdefghi"]},
    "twice the same class": {"classes": ["a", *"abcdefghi"]},
    "a network that is none": {"network": "timm:none"},
    "pixels of a map": {"segments": ["a", "b"], "classes": None},
}


@pytest.fixture(scope="module")
def classifier(digits, tmp_path_factory):
    folder = tmp_path_factory.mktemp("classifier") / "run"
    config = ["--config", str(ROOT / "configs" / "finetune" / "finetune_cifar_tiny.yaml"), *SMALL, *TINY]
    assert finetune([*config, f"data.path={digits}", f"run.dir={folder}"]) == 0
    return folder / "model.safetensors"


@pytest.mark.parametrize("name", HOSTILE)
def test_a_file_of_strangers_is_one_line(classifier, digits, tmp_path, capsys, name):
    with safe_open(classifier, "pt") as file:
        metadata = json.loads(file.metadata()["mae_vit"])
    changed = {key: value for key, value in {**metadata, **HOSTILE[name]}.items() if value is not None}
    path = tmp_path / "model.safetensors"
    save_file(load_file(classifier), path, {"mae_vit": json.dumps(changed)})
    assert predict(path, digits, tmp_path / "p.csv") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"mae-vit: error: {path}")
    assert [one.name for one in tmp_path.iterdir()] == ["model.safetensors"]


def test_a_file_cut_short_says_so(classifier, digits, tmp_path, capsys):
    (tmp_path / "model.safetensors").write_bytes(classifier.read_bytes()[:-100])
    assert predict(tmp_path / "model.safetensors", digits, tmp_path / "p.csv") == 2
    assert "model.safetensors is cut short: download or copy it again" in capsys.readouterr().err


def test_runs_of_other_modes_are_refused(pretrained, digits, tmp_path, capsys):
    few = ["finetune.mode=few_shot", "finetune.shots=[5]"]
    config = [
        "--config",
        str(ROOT / "configs" / "finetune" / "finetune_cifar_tiny.yaml"),
        "--ckpt",
        str(pretrained),
    ]
    place = [
        f"data.path={digits}",
        f"run.dir={tmp_path / 'few'}",
        "model.img_size=8",
        "data.augment.flip=false",
    ]
    assert finetune([*config, *few, *place]) == 0
    capsys.readouterr()
    assert predict(tmp_path / "few", digits, tmp_path / "p.csv") == 2
    assert 'only runs of finetune.mode="finetune" have one' in capsys.readouterr().err
