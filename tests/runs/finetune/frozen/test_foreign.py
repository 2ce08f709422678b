"""Encoders of others in the modes on frozen features: as they are, marked as such, and never trained."""

import csv
import json

import numpy as np
import pytest
import torch
from helpers.commands import ROOT, one_line
from helpers.weights.foreign import build, write_backbone
from safetensors import safe_open

from mae_vit.data.index import open_index
from mae_vit.evaluation.knn import knn_scores
from mae_vit.finetuning.command import main
from mae_vit.weights.encoder import load_encoder

SHORT = ["train.epochs=2", "train.warmup_epochs=0.5", "train.effective_batch_size=64"]


@pytest.fixture
def measure(digits, tmp_path):
    """measure(start, mode, *overrides, config="linear_probe_cifar_tiny") -> exit code, run folder."""

    def run(start, mode, *overrides, config="linear_probe_cifar_tiny", name="run"):
        place = [f"data.path={digits}", f"run.dir={tmp_path / name}", "data.labels_per_class=20"]
        words = ["--config", str(ROOT / "configs" / f"{config}.yaml"), "--ckpt", start]
        return main([*words, *SHORT, *place, f"finetune.mode={mode}", *overrides]), tmp_path / name

    return run


def test_neighbors_are_those_of_timms_features(measure, digits, tmp_path, capsys):
    file = write_backbone(tmp_path / "clip", "clip", interpolation="bilinear")
    code, folder = measure(f"frozen:{file}", "knn")
    assert code == 0
    out = capsys.readouterr().out
    assert "trained by others on other data" in out
    assert "the pretrained weights have model.name=timm:vit_base" in out
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["start_origin"] == "trained by others on other data"
    assert summary["model"] == "timm:vit_base_patch32_clip_224"
    assert summary["labels_seen_by_start"] is None
    # timm's own random weights, which another process draws alike.
    assert 0 <= summary["random_weights_top1"] <= 1

    encoder, network = load_encoder(f"frozen:{file}"), build("clip", 64, file=file)

    def features(split, keys=None):
        index = open_index(digits, split)
        numbers = [place for place, key in enumerate(index.keys()) if keys is None or key in keys]
        images = torch.stack([encoder.transform(index.read(place)) for place in numbers])
        with torch.no_grad():
            return network(images), torch.from_numpy(np.asarray(index.labels)[numbers].astype(np.int64))

    with (folder / "predictions.csv").open() as rows:
        guesses = [row["prediction"] for row in csv.DictReader(rows)]
    query, _ = features("test")
    support, labels = features("train", subset_keys(digits))
    expected = knn_scores(support, labels, query, num_classes=10).argmax(dim=1)
    assert [str(number) for number in expected.tolist()] == guesses


def subset_keys(digits) -> set[str]:
    from mae_vit.data.batches.subset import limit_per_class

    index = open_index(digits, "train")
    labels, keys = np.asarray(index.labels), index.keys()
    samples, _ = limit_per_class(np.arange(len(index)), labels, keys, 20)
    return {keys[sample] for sample in samples}


@pytest.mark.slow
def test_a_probe_of_another_size_and_its_dry_run(measure, tmp_path, capsys):
    file = write_backbone(tmp_path / "convnext", "convnext")
    start = f"frozen:{file}"
    assert measure(start, "linear_probe", "model.img_size=32", "--dry-run")[0] == 0
    out = capsys.readouterr().out
    assert "timm:convnext_atto, 32x32 px, frozen; trained by others on other data" in out
    code, folder = measure(start, "linear_probe", "model.img_size=32")
    assert code == 0
    assert "(linear_probe, trained by others on other data; always" in capsys.readouterr().out
    with safe_open(folder / "linear.safetensors", framework="pt") as weights:
        assert weights.get_slice("head.weight").get_shape() == [10, 20]
        facts = json.loads(weights.metadata()["mae_vit"])
    assert facts["network"] == "timm:convnext_atto"
    assert "pool" not in facts
    assert measure(start, "linear_probe", "model.img_size=32")[0] == 0
    assert "is finished" in capsys.readouterr().out
    write_backbone(tmp_path / "convnext", "convnext", seed=1)
    assert measure(start, "linear_probe", "model.img_size=32")[0] == 2
    assert "finetune.start_digest was" in one_line(capsys)


@pytest.mark.parametrize(
    ("mode", "overrides", "expected"),
    [
        (
            "finetune",
            [],
            "never trained here: give finetune.mode=knn, few_shot, linear_probe or segment_probe",
        ),
        ("knn", ["finetune.pool=cls"], 'finetune.pool="cls" has no effect'),
        ("knn", ["model.name=B"], "brings its own network, timm:vit_small_patch14_reg4_dinov2"),
        ("knn", ["model.name=timm:resnet18"], "brings its own network"),
        ("knn", ["model.img_size=30"], "does not take images of 30x30 px"),
        ("linear_probe", ["optim.layer_decay=0.75"], "optim.layer_decay=0.75: no effect"),
    ],
)
def test_what_does_not_fit_is_one_line_and_nothing_is_written(
    measure, tmp_path, capsys, mode, overrides, expected
):
    code, folder = measure(f"frozen:{write_backbone(tmp_path / 'dinov2', 'dinov2')}", mode, *overrides)
    assert code == 2
    assert expected in one_line(capsys)
    assert not folder.exists()


def test_training_is_refused_before_anything_is_fetched(measure, capsys, monkeypatch):
    def refuse(*_):
        raise AssertionError("fetched")

    monkeypatch.setattr("mae_vit.weights.foreign.download", refuse)
    assert measure("frozen:timm:vit_small_patch14_dinov2", "finetune")[0] == 2
    assert "never trained here" in one_line(capsys)
