"""Ranks that are about to do different things do nothing."""

import pytest
from launching import Run


@pytest.mark.slow
@pytest.mark.distributed
def test_ranks_with_other_data_are_refused(digits, many_shards, tmp_path):
    """As of a node whose copy of the data is an older one."""
    run = Run(
        tmp_path / "run",
        "deepspeed",
        2,
        [
            *(
                "--config",
                "configs/mae_digits.yaml",
                f"data.path={digits}:{many_shards}",
                "model.embed_dim=32",
            ),
            *("model.depth=1", "train.epochs=1", "train.warmup_epochs=0", "monitor.tensorboard=false"),
        ],
        script="tests/distributed/differing.py",
    )
    assert run.wait(90) != 0, run.output()
    assert "error: ranks are about to do different things: data." in run.output()
    assert "on rank 1 (" in run.output()
    assert not (tmp_path / "run").exists()
