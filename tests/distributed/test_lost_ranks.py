"""A rank that dies, or stands still, ends the others: with a clear message, within a stated time."""

import os
import signal
import subprocess
import sys

import psutil
import pytest
from distributed.launch import ROOT, free_port, hear_signals
from helpers.commands import wait_until

# Longer than a step takes on a busy machine.
TIMEOUT_S = 20.0
ARGUMENTS = [
    *("--config", "configs/pretrain/mae_digits.yaml", "model.embed_dim=32", "model.depth=1"),
    *("train.epochs=3000", "data.workers=0", "monitor.log_every_steps=5", "monitor.tensorboard=false"),
    *("checkpoint.every_steps=20", f"run.hang_timeout_s={TIMEOUT_S}"),
]


@pytest.fixture
def ranks(digits, tmp_path):
    """Two ranks that no launcher looks after, in the middle of a run."""
    folder, port, started = tmp_path / "run", str(free_port()), []
    command = [sys.executable, "pretrain/run.py", *ARGUMENTS]
    for rank in range(2):
        place = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"}
        environment = os.environ | place | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        with (tmp_path / f"rank{rank}.log").open("w") as log:
            started.append(
                subprocess.Popen(
                    [*command, f"data.path={digits}", f"run.dir={folder}"],
                    cwd=ROOT,
                    env=environment | {"OMP_NUM_THREADS": "1"},
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    preexec_fn=hear_signals,
                )
            )
    try:
        saved = folder / "checkpoints" / "step-00000040"
        wait_until(lambda: saved.exists() or any(process.poll() is not None for process in started))
        assert all(process.poll() is None for process in started), (tmp_path / "rank0.log").read_text()
        yield started
    finally:
        for process in started:
            if process.poll() is None:
                for child in psutil.Process(process.pid).children(recursive=True):
                    child.kill()
            process.kill()
            process.wait()


@pytest.mark.distributed
def test_a_rank_that_dies_is_missed_at_once(ranks, tmp_path):
    ranks[1].kill()
    assert ranks[0].wait(100) == 75
    last = (tmp_path / "rank0.log").read_text().strip().splitlines()[-1]
    assert last.startswith("error: rank 0 lost the connection")


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("still", [0, 1])
def test_a_rank_that_stands_still_is_not_waited_for_for_ever(ranks, tmp_path, still):
    ranks[still].send_signal(signal.SIGSTOP)
    other = 1 - still
    # In an evaluation or a save it has four times as long.
    assert ranks[other].wait(4 * TIMEOUT_S + 60) == -signal.SIGKILL
    said = (tmp_path / f"rank{other}.log").read_text()
    assert f"error: rank {other} made no progress" in said
    assert "in a training step" in said
    assert "trainer.py" in said  # where it stood
