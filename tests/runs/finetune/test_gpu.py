"""What follows pretraining gives the same on a GPU and on its CPU."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from helpers.commands import csv_rows, lines_of, run, summary_of
from helpers.finetune import SMALL

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]

PLACES = {"cpu": {"CUDA_VISIBLE_DEVICES": ""}, "gpu": {}}


def done(*arguments: str | Path, place: str = "gpu") -> None:
    ran = run(*map(str, arguments), timeout=500, env={**os.environ, **PLACES[place]})
    assert ran.returncode == 0, ran.stderr


@pytest.fixture(scope="module")
def encoder(digits, tmp_path_factory) -> Path:
    """An MAE run of a few steps."""
    folder = tmp_path_factory.mktemp("gpu") / "mae"
    short = ["train.engine=torch", "train.steps=30", "train.warmup_steps=5", "monitor.tensorboard=false"]
    done(
        "pretrain/run.py",
        "configs/pretrain/mae_digits.yaml",
        *short,
        f"data.path={digits}",
        f"run.dir={folder}",
    )
    return folder


def on_both(tmp_path: Path, *arguments: str | Path) -> dict[str, Path]:
    """Fine-tunes an encoder of 8 px, or scores it, once at each place."""
    folders = {place: tmp_path / place for place in PLACES}
    for place, folder in folders.items():
        done("finetune/run.py", *arguments, "model.img_size=8", f"run.dir={folder}", place=place)
        assert bool(json.loads((folder / "environment.json").read_text())["gpus"]) == (place == "gpu")
    return folders


@pytest.mark.parametrize(
    "options",
    [(), ("finetune.mixup=0.8", "finetune.cutmix=1.0", "train.ema_decay=0.9")],
    ids=["plain", "mixed and averaged"],
)
def test_fine_tuning_has_the_losses_of_a_cpu(encoder, digits, tmp_path, options):
    start = ["configs/finetune/finetune_cifar_tiny.yaml", "--ckpt", encoder, f"data.path={digits}", *SMALL]
    folders = on_both(tmp_path, *start, "train.precision=fp32", *options)
    losses = {place: [line["loss"] for line in lines_of(folder)] for place, folder in folders.items()}
    np.testing.assert_allclose(losses["gpu"], losses["cpu"], rtol=1e-4)


@pytest.mark.parametrize("mode", ["linear_probe", "few_shot", "knn"])
def test_frozen_encoders_have_the_scores_of_a_cpu(encoder, digits, tmp_path, mode):
    folders = on_both(tmp_path, "--ckpt", encoder, f"data.path={digits}", f"finetune.mode={mode}")
    scores = {place: summary_of(folder)["test_top1"] for place, folder in folders.items()}
    assert scores["gpu"] == pytest.approx(scores["cpu"], abs=0.01)


def test_predictions_and_features_are_those_of_a_cpu(encoder, digits, tmp_path):
    tuned, features, tables = tmp_path / "tuned", {}, {}
    words = ["--ckpt", encoder, *SMALL, "train.steps=60", f"data.path={digits}", "model.img_size=8"]
    done("finetune/run.py", "configs/finetune/finetune_cifar_tiny.yaml", *words, f"run.dir={tuned}")
    for place in PLACES:
        common = [digits, "--split", "test", "--device", "cuda" if place == "gpu" else "cpu", "--out"]
        done("-m", "mae_vit.cli", "embed", encoder, *common, tmp_path / place)
        features[place] = np.load(tmp_path / place / "features.npy")
        done("-m", "mae_vit.cli", "predict", tuned, *common, tmp_path / f"{place}.csv")
        tables[place] = csv_rows(tmp_path / f"{place}.csv")
    np.testing.assert_allclose(features["gpu"], features["cpu"], rtol=1e-3, atol=1e-4)
    assert len(tables["gpu"]) == len(tables["cpu"]) == 300
    equal = [a["prediction"] == b["prediction"] for a, b in zip(tables["gpu"], tables["cpu"], strict=True)]
    assert sum(equal) >= 298


def test_a_run_that_began_on_a_cpu_resumes_on_a_gpu(digits, tmp_path):
    options = [
        *("pretrain/run.py", "configs/pretrain/mae_digits.yaml", "train.engine=torch", f"data.path={digits}"),
        *("train.steps=20", "train.warmup_steps=5", "checkpoint.every_steps=10", "checkpoint.keep_last=9"),
        *("monitor.log_every_steps=1", "monitor.tensorboard=false", "run.name=same"),
    ]
    whole, moved = tmp_path / "whole", tmp_path / "moved"
    done(*options, f"run.dir={whole}", place="cpu")
    done(*options, f"run.dir={moved}", "--resume", whole / "checkpoints" / "step-00000010")
    losses = [[line["loss"] for line in lines_of(folder)] for folder in (whole, moved)]
    assert [len(each) for each in losses] == [20, 10]
    np.testing.assert_allclose(losses[1], losses[0][10:], rtol=1e-4)
