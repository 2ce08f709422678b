"""RankMe and the spread of features in runs: of which images, of which tokens, and where they are shown."""

import math

import numpy as np
import pytest
import torch
from helpers.commands import ROOT, SMALL_PRETRAIN, lines_of, summary_of
from helpers.finetune import TINY

from mae_vit.finetuning.command import main as finetune_main
from mae_vit.inspection.images import draw_samples
from mae_vit.pretraining.command import main as pretrain_main
from mae_vit.training import evals
from mae_vit.weights.encoder import load_vit


def by_hand(path, data, split: str, pool: str) -> tuple[float, float]:
    """Both measures of all images of a split, from an SVD."""
    encoder = load_vit(path, pool=pool)
    samples = draw_samples(str(data), count=10_000, encoder=encoder.info, split=split)
    with torch.no_grad():
        features = encoder(encoder.normalize(samples.images)).double().numpy()
    singular = np.linalg.svd(features, compute_uv=False)
    shares = singular / singular.sum() + 1e-7
    directions = features / np.linalg.norm(features, axis=1, keepdims=True)
    return math.exp(-(shares * np.log(shares)).sum()), directions.std(axis=0).mean() * features.shape[
        1
    ] ** 0.5


def train(data, folder) -> dict[str, float]:
    config = [
        "--config",
        str(ROOT / "configs" / "pretrain" / "mae_digits.yaml"),
        *SMALL_PRETRAIN,
        *TINY,
        f"data.path={data}",
    ]
    options = [f"run.dir={folder}", "train.precision=fp32", "monitor.evaluate_images=10000"]
    assert pretrain_main([*config, *options, "monitor.probe_queries=0"]) == 0
    return lines_of(folder)[-1]["heldout"]


def test_every_evaluation_measures_the_mean_of_the_patches(digits, tmp_path):
    measured = train(digits, tmp_path / "run")
    rank, spread = by_hand(tmp_path / "run" / "encoder.safetensors", digits, "test", "mean")
    assert measured["rankme"] == pytest.approx(rank, rel=1e-3)
    assert measured["feature_std"] == pytest.approx(spread, rel=1e-3)
    evaluated = [line for line in lines_of(tmp_path / "run") if "heldout" in line]
    assert len(evaluated) == 2
    assert all(math.isfinite(line["heldout"]["rankme"]) for line in evaluated)


def test_the_number_of_measured_images_is_bounded(digits, tmp_path, monkeypatch):
    monkeypatch.setattr(evals, "MOST_RANKED", 1)
    assert train(digits, tmp_path / "run")["rankme"] == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize("mode", ["knn", "few_shot"])
def test_modes_in_closed_form_measure_the_training_images(call, pretrained, digits, tmp_path, capsys, mode):
    options = ["finetune.pool=cls", "train.precision=fp32"]
    options += ["finetune.shots=[2]", "finetune.draws=1"] if mode == "few_shot" else []
    assert call(f"finetune.mode={mode}", *options, ckpt=pretrained) == 0
    check_summary(
        tmp_path / "run", by_hand(pretrained / "encoder.safetensors", digits, "train", "cls"), capsys
    )


def test_a_linear_probe_measures_its_training_images(pretrained, digits, tmp_path, capsys):
    config = [
        "--config",
        "linear_probe_cifar_tiny",
        "--ckpt",
        str(pretrained),
    ]
    place = [f"data.path={digits}", f"run.dir={tmp_path / 'run'}", "run.name=probe", "model.img_size=8"]
    short = [
        "train.epochs=1",
        "train.warmup_epochs=null",
        "train.effective_batch_size=64",
        "finetune.holdout=0",
    ]
    rates = ["finetune.lr_factors=[1.0]", "train.precision=fp32", "finetune.pool=cls"]
    assert finetune_main([*config, *place, *short, *rates]) == 0
    check_summary(
        tmp_path / "run", by_hand(pretrained / "encoder.safetensors", digits, "train", "cls"), capsys
    )


def check_summary(folder, expected, capsys) -> None:
    summary = summary_of(folder)
    assert (summary["rankme"], summary["feature_std"]) == pytest.approx(expected, rel=1e-3)
    assert f"rank {expected[0]:.1f} of 16 (RankMe)" in capsys.readouterr().out
