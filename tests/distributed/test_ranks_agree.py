"""Ranks do the same, or nothing."""

import shutil
from pathlib import Path

import pytest
from distributed.launch import Run, logged_steps

OPTIONS = ("--config", "configs/pretrain/mae_digits.yaml", "model.embed_dim=32", "model.depth=1")
SHORT = ("train.warmup_epochs=0", "monitor.tensorboard=false", "monitor.log_every_steps=1")


def run_with(folder: Path, *arguments: str) -> Run:
    """Two ranks; rank 1 has options of its own."""
    return Run(
        folder,
        "deepspeed",
        2,
        [*OPTIONS, *SHORT, *arguments],
        script="tests/distributed/workers/pretrain_other_options_on_rank_1.py",
    )


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("what", ["data", "config"])
def test_ranks_with_other_data_or_another_config_are_refused(digits, many_shards, tmp_path, what):
    """As of a node whose copy of the data, or of the config, is an older one."""
    other, named = {
        "data": (f"data.path={many_shards}", "data."),
        "config": ("optim.lr=0.01", "optim.lr"),
    }[what]
    run = run_with(tmp_path / "run", f"data.path={digits}", "train.epochs=1", f"rank1={other}")
    assert run.wait(240) != 0, run.output()
    assert f"error: ranks differ in {named}" in run.output()
    assert "on rank 1 (" in run.output()
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.distributed
def test_a_node_that_sees_checkpoints_late_goes_on_from_the_same(digits, tmp_path):
    """As by a network file system, which may show a folder as it was a while ago."""
    folder, late = tmp_path / "run", tmp_path / "late"
    begun = run_with(folder, f"data.path={digits}", "train.epochs=1", "checkpoint.every_steps=4")
    assert begun.wait(240) == 0, begun.output()
    shutil.copytree(folder, late)
    newest = max((late / "checkpoints").iterdir())
    shutil.rmtree(newest)
    assert list((late / "checkpoints").iterdir())
    run = run_with(folder, f"rank1=run.dir={late}", f"data.path={digits}", "train.epochs=2", "--extend")
    assert run.wait(240) == 0, run.output()
    steps = logged_steps(folder)
    assert steps == list(range(1, len(steps) + 1))
