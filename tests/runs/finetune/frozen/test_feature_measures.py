"""RankMe and the spread of features in runs: of which images, and of which tokens."""

import math

import pytest
import torch
from helpers.commands import SMALL_PRETRAIN, lines_of, summary_of
from helpers.finetune import TINY

from mae_vit.evaluation.feature_rank import feature_metrics, feature_sums
from mae_vit.inspection.images import draw_samples
from mae_vit.pretraining.command import main as pretrain_main
from mae_vit.training import evals
from mae_vit.weights.encoder import load_vit


def measured_alone(path, data, split: str, pool: str) -> tuple[float, float]:
    """Both measures of all images of a split."""
    encoder = load_vit(path, pool=pool)
    samples = draw_samples(str(data), count=10_000, encoder=encoder.info, split=split)
    with torch.no_grad():
        features = encoder(encoder.normalize(samples.images))
    return tuple(feature_metrics(feature_sums(features), features.shape[1]).values())


def train(data, folder) -> dict[str, float]:
    options = [f"run.dir={folder}", "train.precision=fp32", "monitor.evaluate_images=10000"]
    words = ["--config", "mae_digits", *SMALL_PRETRAIN, *TINY, f"data.path={data}", *options]
    assert pretrain_main([*words, "monitor.probe_queries=0"]) == 0
    return lines_of(folder)[-1]["heldout"]


def test_every_evaluation_measures_the_mean_of_the_patches(digits, tmp_path):
    measured = train(digits, tmp_path / "run")
    expected = measured_alone(tmp_path / "run" / "encoder.safetensors", digits, "test", "mean")
    assert (measured["rankme"], measured["feature_std"]) == pytest.approx(expected, rel=1e-3)
    evaluated = [line for line in lines_of(tmp_path / "run") if "heldout" in line]
    assert len(evaluated) == 2
    assert all(math.isfinite(line["heldout"]["rankme"]) for line in evaluated)


def test_the_number_of_measured_images_is_bounded(digits, tmp_path, monkeypatch):
    monkeypatch.setattr(evals, "MOST_RANKED", 1)
    assert train(digits, tmp_path / "run")["rankme"] == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize("mode", ["knn", "linear_probe"])
def test_frozen_modes_measure_the_training_images(shared, pretrained, digits, mode):
    words = [f"finetune.mode={mode}", "finetune.pool=cls", "train.precision=fp32"]
    options = {}
    if mode == "linear_probe":
        words += ["train.epochs=1", "train.warmup_epochs=null", "train.effective_batch_size=64"]
        words += ["finetune.holdout=0", "finetune.lr_factors=[1.0]"]
        options = {"config": "linear_probe_cifar_tiny", "small": ()}
    folder, out, _ = shared(*words, ckpt=pretrained, **options)
    expected, summary = (
        measured_alone(pretrained / "encoder.safetensors", digits, "train", "cls"),
        summary_of(folder),
    )
    assert (summary["rankme"], summary["feature_std"]) == pytest.approx(expected, rel=1e-3)
    assert f"rank {expected[0]:.1f} of 16" in out
