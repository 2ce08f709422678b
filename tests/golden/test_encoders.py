"""Included encoders give the frozen accuracies of docs/results, where the images that were measured are at hand.

MAE_VIT_CIFAR10 is the folder of the shards that docs/results.md tells how to make. Without it nothing is tested.
"""

import json
import os
from pathlib import Path

import pytest
from helpers.commands import ROOT, csv_rows

from mae_vit.data.index import open_index
from mae_vit.finetuning.command import main as finetune

DATA = os.environ.get("MAE_VIT_CIFAR10")
FROZEN = [
    row
    for row in csv_rows(ROOT / "docs" / "results" / "compare_cifar10_5k" / "results.csv")
    if row["mode"] == "few_shot" and row["seed"] == "0" and row["start"].startswith("docs/")
]


def test_there_are_figures_to_compare_with():
    assert len({row["start"] for row in FROZEN}) == 3


@pytest.mark.slow
@pytest.mark.skipif(DATA is None, reason="MAE_VIT_CIFAR10 names no shards of the measured images")
@pytest.mark.parametrize("row", FROZEN, ids=[row["entry"] for row in FROZEN])
def test_an_included_encoder_reaches_its_stated_figure(row, tmp_path):
    for split, column in (("train", "data"), ("test", "test_data")):
        assert open_index(Path(DATA), split).fingerprint == row[column], f"{DATA} holds other images"
    config = str(ROOT / "configs" / "finetune" / "finetune_cifar_tiny.yaml")
    settings = [f"data.path={DATA}", "data.labels_per_class=500", "train.precision=bf16", "finetune.draws=1"]
    settings += ["finetune.mode=few_shot", "finetune.shots=[500]", f"run.dir={tmp_path / 'run'}"]
    assert finetune(["--config", config, "--ckpt", str(ROOT / row["start"]), *settings]) == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    # Sums of another processor have another order: ten of 10,000 images.
    assert summary["few_shot"]["500"]["mean"] == pytest.approx(float(row["test_top1"]), abs=1e-3)
