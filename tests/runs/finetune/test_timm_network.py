"""Networks of timm that ours cannot be: measured and trained with their own pooling, and marked as others'."""

import json

import numpy as np
import pytest
import timm
import torch
from helpers.commands import csv_rows, one_line, summary_of
from helpers.weights.backbones import build, write_backbone, write_named
from safetensors import safe_open
from safetensors.torch import load_file

from mae_vit.data.batches.subset import limit_per_class
from mae_vit.data.index import open_index
from mae_vit.evaluation.knn import knn_scores
from mae_vit.finetuning.config.pretrained import WeightsOverrides
from mae_vit.finetuning.models.classifier_file import load_classifier
from mae_vit.finetuning.models.classifiers import NetworkClassifier
from mae_vit.models.encoders.baselines import build_network
from mae_vit.objectives.label_loss import LabelLoss
from mae_vit.weights.encoder import load_encoder
from mae_vit.weights.names import FOREIGN_ORIGIN
from mae_vit.weights.read import read_weights

SHORT = ["train.epochs=2", "train.warmup_epochs=0.5", "train.effective_batch_size=64"]


@pytest.fixture
def measure(call, pairs, tmp_path):
    """measure(file, mode, *overrides) -> exit code, run folder; on masks where the mode is theirs."""

    def run(file, mode, *overrides):
        words, options = [f"finetune.mode={mode}", f"--ckpt={file}"], {"model": ()}
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
    encoder, network = load_encoder(f"{file}"), build("clip", 64, file=file)

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
        *("finetune", "segment", "knn finetune.pool=cls", "finetune finetune.head_init=small", "few_shots"),
        *("knn model.name=B", "knn model.name=timm:resnet18", "knn model.img_size=30"),
        *("segment_probe model.img_size=30", "linear_probe optim.layer_decay=0.75"),
    ],
)
def test_what_does_not_fit_is_one_line_and_nothing_is_written(measure, tmp_path, capsys, words, said):
    code, folder = measure(write_backbone(tmp_path / "dinov2", "dinov2"), *words.split())
    assert code == 2
    said(one_line(capsys))
    assert not folder.exists()


def test_training_begins_with_timms_features(tmp_path):
    """At another size, with a norm behind the pooling; also with other channels, as timm adapts them."""
    name = write_named("test_vit2", tmp_path)
    weights, file = read_weights(name), name.partition("@")[2]
    for channels in (3, 5):
        network = build_network("timm:test_vit2", num_classes=4, in_chans=channels, img_size=(32, 32))
        facts = {"mean": (0.5,) * channels, "std": (0.5,) * channels, "labels": LabelLoss(4)}
        report = NetworkClassifier(network, **facts).load(weights.fitted((32, 32), channels))
        assert report.share == 1
        overlay = {"file": file, "num_classes": 1000}
        options = {"img_size": 32, "in_chans": channels, "num_classes": 0}
        theirs = timm.create_model("test_vit2", pretrained=True, pretrained_cfg_overlay=overlay, **options)
        images = torch.randn(2, channels, 32, 32)
        ours = network.eval().forward_head(network.forward_features(images), pre_logits=True)
        assert torch.equal(ours, theirs.eval()(images))


@pytest.mark.parametrize("name", ["test_vit2", pytest.param("test_convnext", marks=pytest.mark.slow)])
def test_it_trains_resumes_and_predicts(name, call, tmp_path, capsys):
    weights, folder = write_named(name, tmp_path), tmp_path / "run"
    words = ["model.img_size=32", "data.augment.crop=random_resized", "data.labels_per_class=20"]
    options = {"ckpt": weights, "model": ()}
    assert call(*words, "train.steps=3", **options) == 0
    words.append("train.steps=5")
    assert call(*words, "--extend", **options) == 0
    summary = summary_of(folder)
    assert (summary["start_origin"], summary["model"]) == (FOREIGN_ORIGIN, f"timm:{name}")
    before, after = (load_file(file) for file in (weights.partition("@")[2], folder / "model.safetensors"))
    trained = [key for key in before if before[key].shape == after[key].shape and before[key].ndim > 1]
    assert not [key for key in trained if torch.equal(after[key], before[key])]
    classifier = load_classifier(folder)
    assert classifier.predict(torch.randn(1, 3, 32, 32)).shape == (1, 10)
    capsys.readouterr()
    write_named(name, tmp_path, seed=1)
    assert call(*words, **options) == 2
    assert "--ckpt (the digest" in one_line(capsys)


@pytest.mark.parametrize("named", [True, False])
def test_a_recipe_takes_the_shape_of_a_vision_transformer(call, tmp_path, capsys, named):
    weights = write_named("vit_tiny_patch16_224", tmp_path)
    ckpt = weights if named else weights.partition("@")[2]
    words = ["finetune.mode=knn", "model.img_size=32", "--dry-run"]
    assert call(*words, ckpt=ckpt, config="linear_probe_base", model=(), small=()) == 0
    assert "model.name=Ti, which replaces B" in capsys.readouterr().out


def test_a_recipe_of_the_same_shape_stays_as_it_is(tmp_path):
    """So runs of files without a geometry resume, and their channels are the data's."""
    file = write_named("vit_tiny_patch16_224", tmp_path).partition("@")[2]
    config = tmp_path / "recipe.yaml"
    config.write_text("")
    for name, kept in (("Ti", True), ("B", False)):
        raw = {"model": {"name": name, "patch_size": 16, "img_size": 32}}
        WeightsOverrides(file, config)(raw)
        assert (raw["model"] == {"name": name, "patch_size": 16, "img_size": 32}) == kept
        assert raw["model"]["name"] == "Ti"
        assert "in_chans" not in raw["model"]


@pytest.mark.parametrize("mode", ["segment_probe", pytest.param("segment", marks=pytest.mark.slow)])
def test_a_run_on_masks_says_whose_weights_they_were(mode, measure, tmp_path):
    name = write_named("test_convnext", tmp_path)
    assert measure(name, mode, "model.img_size=32", "--dry-run")[0] == 0
    code, folder = measure(name, mode, "model.img_size=32", "optim.layer_decay=0.75")
    assert code == 0
    summary = summary_of(folder)
    assert (summary["start_origin"], summary["model"]) == (FOREIGN_ORIGIN, "timm:test_convnext")
    assert 0 < summary["test_miou"] <= 1
    before, after = load_file(name.partition("@")[2]), load_file(folder / "model.safetensors")
    kept = [torch.equal(after[key], before[key]) for key in before if not key.startswith("head.fc")]
    assert all(kept) if mode == "segment_probe" else not any(kept)
    assert after["decode_head.classifier.weight"].abs().sum() > 0
    with safe_open(folder / "model.safetensors", framework="pt") as weights:
        assert json.loads(weights.metadata()["mae_vit"])["origin"] == FOREIGN_ORIGIN
