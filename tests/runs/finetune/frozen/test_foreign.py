"""Third-party encoders: measured as they are, marked as such, and never trained."""

import json

import numpy as np
import pytest
import torch
from helpers.commands import csv_rows, one_line, summary_of
from helpers.weights.foreign import KINDS, build, write_backbone
from safetensors import safe_open
from safetensors.torch import load_file

from mae_vit.data.batches.subset import limit_per_class
from mae_vit.data.index import open_index
from mae_vit.evaluation.knn import knn_scores
from mae_vit.weights.encoder import load_encoder
from mae_vit.weights.names import FOREIGN_ORIGIN

SHORT = ["train.epochs=2", "train.warmup_epochs=0.5", "train.effective_batch_size=64"]


@pytest.fixture
def measure(call, pairs, tmp_path):
    """measure(file, mode, *overrides) -> exit code, run folder; on masks where the mode is theirs."""

    def run(file, mode, *overrides):
        words, options = [f"finetune.mode={mode}", f"--ckpt=frozen:{file}"], {"model": ()}
        if mode.startswith("segment"):
            words += [f"data.path={pairs}", "train.effective_batch_size=8"]
            words += ["data.augment.crop=random_resized", "data.label_draw=1"]
        else:
            # In float32, as timm's features are here, on processors with bf16 too.
            words += ["data.labels_per_class=20", "train.precision=fp32"]
            options |= {"config": "linear_probe_cifar_tiny", "small": SHORT}
        return call(*words, *overrides, **options), tmp_path / "run"

    return run


def test_neighbors_are_those_of_timms_features(measure, digits, tmp_path, capsys):
    file = write_backbone(tmp_path / "clip", "clip", interpolation="bilinear")
    code, folder = measure(file, "knn")
    assert code == 0
    out = capsys.readouterr().out
    assert FOREIGN_ORIGIN in out
    assert "model.name=timm:vit_base" in out
    summary = summary_of(folder)
    assert (summary["start_origin"], summary["model"]) == (FOREIGN_ORIGIN, "timm:vit_base_patch32_clip_224")
    assert summary["labels_seen_by_start"] is None
    # timm's own random weights, which another process draws alike.
    assert 0 <= summary["random_weights_top1"] <= 1
    encoder, network = load_encoder(f"frozen:{file}"), build("clip", 64, file=file)

    def features(split, numbers):
        index = open_index(digits, split)
        images = torch.stack([encoder.transform(index.read(number)) for number in numbers])
        with torch.no_grad():
            return network(images), torch.from_numpy(np.asarray(index.labels)[numbers].astype(np.int64))

    train = open_index(digits, "train")
    samples, _ = limit_per_class(np.arange(len(train)), np.asarray(train.labels), train.keys(), 20)
    support, labels = features("train", np.sort(samples))
    query, _ = features("test", np.arange(len(open_index(digits, "test"))))
    expected = knn_scores(support, labels, query, num_classes=10).argmax(dim=1)
    predictions = [row["prediction"] for row in csv_rows(folder / "predictions.csv")]
    assert predictions == [str(n) for n in expected.tolist()]


@pytest.mark.slow
def test_a_probe_of_another_size_and_its_dry_run(measure, tmp_path, capsys):
    file = write_backbone(tmp_path / "convnext", "convnext")
    assert measure(file, "linear_probe", "model.img_size=32", "--dry-run")[0] == 0
    out = capsys.readouterr().out
    assert "timm:convnext_atto, 32x32 px" in out
    assert FOREIGN_ORIGIN in out
    code, folder = measure(file, "linear_probe", "model.img_size=32")
    assert code == 0
    assert f"(linear_probe, {FOREIGN_ORIGIN}; " in capsys.readouterr().out
    with safe_open(folder / "linear.safetensors", framework="pt") as weights:
        assert weights.get_slice("head.weight").get_shape() == [10, 20]
        facts = json.loads(weights.metadata()["mae_vit"])
    assert (facts["network"], "pool" in facts) == ("timm:convnext_atto", False)


@pytest.mark.parametrize(
    "words",
    [
        *("finetune", "segment", "knn finetune.pool=cls", "segment_probe finetune.pool=cls", "few_shots"),
        *("knn model.name=B", "knn model.name=timm:resnet18", "knn model.img_size=30"),
        *("segment_probe model.img_size=30", "linear_probe optim.layer_decay=0.75"),
    ],
)
def test_what_does_not_fit_is_one_line_and_nothing_is_written(measure, tmp_path, capsys, words, said):
    code, folder = measure(write_backbone(tmp_path / "dinov2", "dinov2"), *words.split())
    assert code == 2
    said(one_line(capsys))
    assert not folder.exists()


def test_training_is_refused_before_anything_is_fetched(measure, capsys, monkeypatch, said):
    monkeypatch.setattr("mae_vit.weights.foreign.download", None)
    assert measure("timm:vit_small_patch14_dinov2", "finetune")[0] == 2
    said(one_line(capsys))


@pytest.mark.parametrize(
    "kind", ["dinov2", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("swin", "convnext"))]
)
def test_a_run_on_masks_keeps_the_weights_and_says_whose_they_are(kind, measure, tmp_path, capsys):
    file = write_backbone(tmp_path / kind, kind)
    decay = "optim.layer_decay=0.75"  # of no effect, as the head alone trains
    assert measure(file, "segment_probe", "--dry-run")[0] == 0
    code, folder = measure(file, "segment_probe", decay)
    assert code == 0
    assert capsys.readouterr().out.count(f"{file} is {FOREIGN_ORIGIN}") == 2
    summary = summary_of(folder)
    assert (summary["start_origin"], summary["model"]) == (FOREIGN_ORIGIN, f"timm:{KINDS[kind][0]}")
    assert 0 < summary["test_miou"] <= 1
    before, after = load_file(file), load_file(folder / "model.safetensors")
    facts = json.loads((tmp_path / kind / "config.json").read_text())["pretrained_cfg"]
    heads = ("head.", *facts["classifier"].split(" "))
    for name in before:
        assert name.startswith(heads) or torch.equal(after[name], before[name]), name
    assert after["decode_head.classifier.weight"].abs().sum() > 0
    with safe_open(folder / "model.safetensors", framework="pt") as weights:
        assert json.loads(weights.metadata()["mae_vit"])["origin"] == FOREIGN_ORIGIN
    assert measure(file, "segment_probe", decay)[0] == 0
    assert "is finished" in capsys.readouterr().out
    write_backbone(tmp_path / kind, kind, seed=1)
    assert measure(file, "segment_probe", decay)[0] == 2
    assert "--ckpt (the digest" in one_line(capsys)
