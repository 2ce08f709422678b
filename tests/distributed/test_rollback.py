"""A loss that is not finite on one rank takes all ranks back together, at every ZeRO stage."""

import json
from pathlib import Path

import pytest
from distributed.launch import Run, finished, logged_steps

from mae_vit.training.checkpoints.checkpoint import list_checkpoints, load_checkpoint

SCRIPT = str(Path(__file__).with_name("workers") / "pretrain_nan_on_one_rank.py")
ARGUMENTS = [
    *("--config", "configs/pretrain/mae_digits.yaml", "model.embed_dim=32", "model.depth=1"),
    *("model.num_heads=2", "objective.decoder_embed_dim=16", "objective.decoder_depth=1", "train.steps=9"),
    *("train.warmup_steps=1", "monitor.log_every_steps=100", "monitor.evaluate_every_steps=100"),
    *("monitor.tensorboard=false", "checkpoint.every_steps=2", "checkpoint.keep_last=9"),
    *("guard.skip_steps=1", "data.workers=0", "train.engine=deepspeed"),
]


CASES = [(stage, precision) for stage in (0, 1, 2, 3) for precision in ("fp32", "bf16")]


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("stage", "precision"),
    [case if case == (1, "fp32") else pytest.param(*case, marks=pytest.mark.slow) for case in CASES],
)
def test_all_ranks_go_back_together(digits, tmp_path, stage, precision):
    options = [f"data.path={digits}", f"train.zero_stage={stage}", f"train.precision={precision}"]
    finished(tmp_path / "run", "torchrun", 2, ["1", "5", "6", *ARGUMENTS, *options], SCRIPT)
    incidents = sorted((tmp_path / "run" / "incidents").glob("*.json"))
    assert [path.name for path in incidents] == ["step-00000006-1.json"]
    assert json.loads(incidents[0].read_text())["back_to_step"] == 4
    assert logged_steps(tmp_path / "run") == [9]
    checkpoints = list_checkpoints(tmp_path / "run" / "checkpoints")
    last = load_checkpoint(checkpoints[-1])
    assert last.state.course.skipped == ((5, 6),)
    assert last.state.is_finite()
    assert last.state.optimizer_step == 9


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("stage", [0, 2])
def test_what_stays_bad_ends_all_ranks(digits, tmp_path, stage):
    options = [f"data.path={digits}", f"train.zero_stage={stage}"]
    run = Run(tmp_path / "run", "torchrun", 2, ["1", "5", "11", *ARGUMENTS, *options], script=SCRIPT)
    assert run.wait() == 1
    assert "3 of guard.max_rollbacks=3 from the checkpoint of step 4" in run.output()
    assert run.status() == "failed"
    run.wait_until_gone()
    assert len(list((tmp_path / "run" / "incidents").glob("*.json"))) == 4
