"""`mae-vit predict`: a run's classifier gives new images what the run itself gave its test images."""

import csv

import numpy as np
import pytest
import torch
from PIL import Image

import mae_vit
from mae_vit.cli.main import main
from mae_vit.data.index import open_index


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
    assert f"accuracy {right / 300:.2%} of 300 images with a label" in said
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


def test_labels_of_other_classes_are_kept_and_not_compared(call, tmp_path, capsys):
    assert call() == 0
    for name in ("cat", "owl"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        Image.new("L", (9, 9), 90).save(tmp_path / "photos" / name / "1.png")
    capsys.readouterr()
    assert predict(tmp_path / "run", tmp_path / "photos", tmp_path / "p.csv") == 0
    out, error = capsys.readouterr()
    assert "accuracy" not in out
    assert "note: no folder is named as a class of the run" in error
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
        "does not exist; known: cifar10": (run, tmp_path / "none", out),
    }
    before = sorted(path.name for path in tmp_path.iterdir())
    for said, words in cases.items():
        capsys.readouterr()
        assert predict(*words) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("mae-vit: error: ")
        assert said in line
        assert sorted(path.name for path in tmp_path.iterdir()) == before
