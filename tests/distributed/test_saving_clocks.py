"""Rank 0's clock decides when a run saves by time; the ranks' clocks need not agree."""

from pathlib import Path

import pytest
from distributed.launch import Run, finished
from helpers.commands import saved_steps

SCRIPT = str(Path(__file__).with_name("workers") / "pretrain_with_other_clocks.py")
ARGUMENTS = [
    *("--config", "configs/pretrain/mae_digits.yaml", "model.embed_dim=32", "model.depth=1"),
    *("model.num_heads=2", "objective.decoder_embed_dim=16", "objective.decoder_depth=1", "run.name=same"),
    *("train.steps=10", "train.warmup_steps=1", "train.zero_stage=1", "data.workers=0"),
    *("monitor.log_every_steps=100", "monitor.evaluate_every_steps=100", "monitor.evaluate_images=16"),
    *("monitor.tensorboard=false", "monitor.probe_queries=0", "checkpoint.keep_last=99"),
]
BY_TIME = [*ARGUMENTS, "checkpoint.every_minutes=3"]


@pytest.mark.slow
@pytest.mark.distributed
def test_two_ranks_whose_clocks_differ_save_together_and_resume_from_a_save_by_time(digits, tmp_path):
    options = [*BY_TIME, f"data.path={digits}"]
    killed = Run(tmp_path / "killed", "torchrun", 2, ["die=7", *options], script=SCRIPT)
    assert killed.wait() != 0
    killed.wait_until_gone()
    # Due by step 3 and read with step 4; from there on again.
    assert saved_steps(killed.folder) == [0, 4]
    again = finished(tmp_path / "killed", "torchrun", 2, options, SCRIPT)
    # Its minutes begin with the process.
    assert saved_steps(again.folder) == [0, 4, 8, 10]
    without = finished(tmp_path / "without", "torchrun", 2, [*ARGUMENTS, f"data.path={digits}"], SCRIPT)
    assert saved_steps(without.folder) == [0, 10]
    encoders = [(run.folder / "encoder.safetensors").read_bytes() for run in (again, without)]
    assert encoders[0] == encoders[1]
