"""`mae-vit predict`: a run's classifier gives new images what the run itself gave its test images."""

import json
import math
import shutil
from collections import Counter

import numpy as np
import pytest
import torch
from helpers.commands import csv_rows, one_line
from helpers.damage import copy_of, description
from helpers.finetune import CNN, SMALL
from helpers.images import encoded, picture, write_files
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import mae_vit
from mae_vit.cli.main import main
from mae_vit.core.errors import InputError
from mae_vit.data.index import open_index
from mae_vit.finetuning.command import main as finetune
from mae_vit.models.encoder_file import to_metadata
from mae_vit.models.encoders.baselines import build_network


def predict(run, data, out, *words) -> int:
    out.unlink(missing_ok=True)
    return main(["predict", str(run), str(data), "--out", str(out), "--workers", "0", *map(str, words)])


@pytest.fixture
def run(shared):
    """The folder of a fine-tuned Vision Transformer."""
    return shared().folder


@pytest.fixture
def photos(tmp_path):
    """Writes photographs of the given names."""

    def write(*names):
        pictures = {name: encoded(picture(n, (30, 20), "L"), "png") for n, name in enumerate(names)}
        return write_files(tmp_path / "photos", pictures)

    return write


NETWORKS = {
    "mean": [],
    "cls": ["finetune.pool=cls"],
    "SimpleCNN": [],
    "fixed positions": ["model.pos_embed=sincos"],
    "rotary positions": ["model.family=vit_rope"],
}


@pytest.mark.parametrize("network", NETWORKS)
def test_predictions_of_test_images_are_those_of_the_run(shared, digits, tmp_path, capsys, network):
    folder = shared(*NETWORKS[network], **(CNN if network == "SimpleCNN" else {})).folder
    assert predict(folder, digits, tmp_path / "p.csv", "--split", "test", "--top", 2) == 0
    out, err = capsys.readouterr()
    assert "too high" not in err
    # Prepared apart, they may have been trained on.
    other = copy_of(digits, tmp_path / "other")
    with description(other) as described:
        for split in described["splits"].values():
            split["shards"][0]["sha256"] = "0" * 64
    assert predict(folder, other, tmp_path / "q.csv", "--split", "test") == 0
    assert "too high" in capsys.readouterr().err
    ours, theirs = csv_rows(tmp_path / "p.csv"), csv_rows(folder / "predictions.csv")
    again = ["predict", str(folder), str(digits), "--split", "test", "--workers", "0"]
    assert main(again) == 0
    for more in ([], ["--out", str(tmp_path / "p.csv")]):
        capsys.readouterr()
        assert main([*again, *more]) == 2, "predictions of other images stay, and other files"
        assert "--out" in one_line(capsys)
    assert main(["predict", str(folder), str(digits / "nope")]) == 2
    assert "nope" in one_line(capsys)
    assert [row["prediction"] for row in csv_rows(folder / "predicted.csv")] == [
        row["prediction"] for row in ours
    ]
    (folder / "predicted.csv").unlink()  # other tests share the run
    assert len(ours) == len(theirs) == 300
    known = {row["key"]: row for row in theirs}
    for row in ours:
        other = known[row["key"]]
        assert (row["label"], row["prediction"]) == (other["label"], other["prediction"])
        assert float(row["probability"]) == pytest.approx(float(other["confidence"]), abs=2e-5)
        assert float(row["probability_2"]) <= float(row["probability"])
        assert row["prediction_2"] != row["prediction"]
    right = sum(row["label"] == row["prediction"] for row in ours)
    assert f"accuracy {right / 300:.2%}" in out
    assert {row["split"] for row in ours} == {"test"}


def test_a_folder_of_images_with_a_broken_one(run, digits, photos, tmp_path, capsys, monkeypatch):
    folder = photos("0.png", "1.png", "2.png")
    (folder / "broken.png").write_bytes(b"none")
    assert predict(run / "model.safetensors", folder, tmp_path / "p.csv") == 0
    out = capsys.readouterr().out
    assert "1 broken image" in out
    assert "accuracy" not in out
    rows = csv_rows(tmp_path / "p.csv")
    assert [row["path"] for row in rows] == ["0.png", "1.png", "2.png"]
    assert list(rows[0]) == ["path", "key", "prediction", "probability"]
    assert [row["path"] for row in csv_rows(tmp_path / "p.broken.csv")] == ["broken.png"]
    with monkeypatch.context() as patch:
        patch.setattr("mae_vit.runtime.signals.StopRequest", lambda: True)
        assert predict(run, folder, tmp_path / "q.csv") != 0
    assert not list(tmp_path.glob("q*"))
    classifier = mae_vit.load_classifier(run)
    assert classifier.classes == tuple(open_index(digits, "test").dataset.classes)
    (chances,) = classifier.predict(classifier.transform(folder / "1.png")[None])
    assert chances.sum().item() == pytest.approx(1)
    assert classifier.classes[int(chances.argmax())] == rows[1]["prediction"]
    assert chances.max().item() == pytest.approx(float(rows[1]["probability"]), abs=1e-5)
    with pytest.raises(TypeError, match="load_encoder"):
        classifier.patch_map(torch.zeros(1, 1, 8, 8))


def test_folders_without_a_classifier_say_what_they_are(run, tmp_path, said):
    shutil.copytree(run, tmp_path / "run")
    for name in ("unfinished", "pretrained"):
        (tmp_path / name).mkdir()
    (tmp_path / "pretrained" / "encoder.safetensors").touch()
    # A row of a comparison: a tuning run, which has no test results, and a cell.
    for name in ("0", "1"):
        shutil.copytree(run, tmp_path / "row" / name)
    (tmp_path / "row" / "0" / "results.json").unlink()
    for name in ("rum", "row", "unfinished", "pretrained"):
        with pytest.raises(InputError) as error:
            mae_vit.load_classifier(tmp_path / name)
        said(error)


def test_the_images_that_were_trained_on_are_named(run, digits, tmp_path, capsys):
    assert predict(run, digits, tmp_path / "p.csv") == 0
    assert "--split test" in capsys.readouterr().err
    assert Counter(row["split"] for row in csv_rows(tmp_path / "p.csv")) == {"train": 1497, "test": 300}
    assert predict(run, digits, tmp_path / "p.csv", "--split", "test") == 0
    assert "note: " not in capsys.readouterr().err
    described = json.loads((digits / "dataset.json").read_text())
    described["splits"]["val"] = described["splits"].pop("test")
    only = tmp_path / "data"
    shutil.copytree(digits, only)
    (only / "dataset.json").write_text(json.dumps(described))
    assert predict(run, only, tmp_path / "p.csv", "--split", "train") == 0
    assert "--split val" in capsys.readouterr().err


def test_bands_of_16_bits(tmp_path):
    rng, tiles, run = np.random.default_rng(0), tmp_path / "data", tmp_path / "run"
    for number in range(24):
        path = tmp_path / "tiles" / ("land", "water")[number % 2] / f"{number}.npy"
        path.parent.mkdir(parents=True, exist_ok=True)
        np.save(path, rng.integers(9 * number, 20_000, (4, 16, 16)).astype(np.uint16))
    assert main(["prepare", str(tmp_path / "tiles"), str(tiles), "--holdout", "0.25"]) == 0
    options = [f"data.path={tiles}", "model.img_size=16", "train.effective_batch_size=8", f"run.dir={run}"]
    assert finetune(["--config", "simple_cnn_cifar", *SMALL, *options]) == 0
    assert predict(run, tiles, tmp_path / "p.csv", "--split", "val") == 0
    known = {row["key"]: row for row in csv_rows(run / "predictions.csv")}
    rows = csv_rows(tmp_path / "p.csv")
    assert len(rows) == len(known) > 3
    for row in rows:
        assert row["prediction"] == known[row["key"]]["prediction"]
        assert float(row["probability"]) == pytest.approx(float(known[row["key"]]["confidence"]), abs=2e-5)


def test_labels_of_other_classes_are_kept_and_not_compared(run, photos, tmp_path, capsys):
    assert predict(run, photos("3/1.png", "owl/1.png"), tmp_path / "p.csv") == 0
    out, err = capsys.readouterr()
    assert "on 1 image" in out
    assert "prepared data" in err, "what it was trained on is not known by files"
    assert "(owl)" in err
    shutil.rmtree(tmp_path / "photos" / "3")
    assert predict(run, photos("cat/1.png"), tmp_path / "p.csv") == 0
    out, err = capsys.readouterr()
    assert "accuracy" not in out
    assert "(cat, owl)" in err
    assert [row["label"] for row in csv_rows(tmp_path / "p.csv")] == ["cat", "owl"]
    assert predict(run, tmp_path / "photos", tmp_path / "q.csv", "--no-labels") == 0
    assert "label" not in csv_rows(tmp_path / "q.csv")[0]


def test_bad_input_is_one_line_and_leaves_nothing(run, shared, pretrained, digits, tmp_path, capsys, said):
    out = tmp_path / "p.csv"
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes((run / "model.safetensors").read_bytes()[:-100])
    cases = [
        *((run, digits, tmp_path / "p.npz"), (run, digits, out, "--top", 11), (cut, digits, out)),
        *((run, digits, out, "--batch-size", 0), (tmp_path / "none", digits, out)),
        *((pretrained / "encoder.safetensors", digits, out), (run, digits, out, "--split", "tst")),
        (run, tmp_path / "none", tmp_path / "new" / "p.csv"),
        (shared("finetune.mode=knn", ckpt=pretrained).folder, digits, out),
    ]
    before = sorted(path.name for path in tmp_path.iterdir())
    for words in cases:
        capsys.readouterr()
        assert predict(*words) == 2
        said(one_line(capsys))
        assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_a_network_of_large_images_is_read(tmp_path):
    network = build_network("SimpleCNN", num_classes=2, in_chans=3, img_size=(300, 300))
    facts = {"network": "SimpleCNN", "img_size": [300, 300], "classes": ["a", "b"]}
    metadata = to_metadata({**facts, "mean": [0.5] * 3, "std": [0.2] * 3})
    save_file(network.state_dict(), tmp_path / "model.safetensors", metadata)
    assert mae_vit.load_classifier(tmp_path).classes == ("a", "b")


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


@pytest.mark.parametrize("name", HOSTILE)
def test_a_file_of_strangers_is_one_line(run, digits, tmp_path, capsys, name):
    with safe_open(run / "model.safetensors", "pt") as file:
        metadata = json.loads(file.metadata()["mae_vit"])
    changed = {key: value for key, value in {**metadata, **HOSTILE[name]}.items() if value is not None}
    path = tmp_path / "model.safetensors"
    save_file(load_file(run / "model.safetensors"), path, {"mae_vit": json.dumps(changed)})
    assert predict(path, digits, tmp_path / "p.csv") == 2
    assert one_line(capsys).startswith(f"error: {path}")
    assert [file.name for file in tmp_path.iterdir()] == ["model.safetensors"]
