"""The preset with Pixio's options: it trains, and what reads encoders reads this one."""

import numpy as np
import pytest
import torch
from helpers.commands import lines_of, summary_of

import mae_vit
from mae_vit.cli.main import main as cli
from mae_vit.finetuning.command import main as finetune
from mae_vit.pretraining.command import main as pretrain

SHORT = [
    *("train.epochs=null", "train.steps=20", "train.warmup_epochs=null", "train.warmup_steps=4"),
    *("train.effective_batch_size=16", "train.engine=torch", "monitor.evaluate_images=16"),
    *("monitor.log_every_steps=1", "monitor.tensorboard=false"),
    "monitor.probe_queries=0",
]


@pytest.mark.slow
def test_all_that_reads_encoders_reads_it(colored, tmp_path):
    run = tmp_path / "run"
    place = [f"data.path={colored}", f"run.dir={run}"]
    fewer = ["objective.decode_ratio=0.5", "model.depth=2", "objective.decoder_depth=2"]
    assert pretrain(["--config", "pixio_cifar_tiny", *SHORT, *place, *fewer]) == 0
    losses = [line["loss"] for line in lines_of(run)]
    assert np.mean(losses[-4:]) < 0.97 * np.mean(losses[:4])
    assert mae_vit.load_encoder(run).info.vit.class_tokens == 4
    common = [f"data.path={colored}", "train.engine=torch", "monitor.tensorboard=false"]
    short = ["train.epochs=null", "train.steps=2", "train.warmup_epochs=null", "train.warmup_steps=1"]
    tune = ["--config", "finetune_cifar_tiny", "--ckpt", str(run)]
    for name, more in {
        "cls": ["finetune.pool=cls", *short, "train.effective_batch_size=8"],
        "mean": ["finetune.pool=mean", *short, "train.effective_batch_size=8"],
        "knn": ["finetune.mode=knn"],
        "few_shot": ["finetune.mode=few_shot", "finetune.shots=[2]", "finetune.draws=1"],
    }.items():
        folder = tmp_path / name
        assert finetune([*tune, *common, *more, f"run.dir={folder}", "finetune.holdout=0"]) == 0, name
        assert 0 <= summary_of(folder)["test_top1"] <= 1
    tuned = mae_vit.load_encoder(tmp_path / "cls")
    assert tuned.pool == "cls"
    with torch.no_grad():
        features = tuned(torch.randn(2, 3, 32, 32))
    assert features.shape == (2, 128)
    assert cli(["inspect", str(run), "--data", str(colored), "--out", str(tmp_path / "views")]) == 0
    assert (tmp_path / "views" / "attention-rollout.png").exists()
    assert cli(["embed", str(run), str(colored), "--out", str(tmp_path / "features")]) == 0
    assert np.load(tmp_path / "features" / "features.npy").shape[1] == 128
