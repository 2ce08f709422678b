"""The cluster, started for the tests that ask for it, and the run that the others are compared with."""

import subprocess
from pathlib import Path

import pytest
from slurm.cluster import SCRIPT, Cluster


@pytest.fixture(scope="session")
def machines(tmp_path_factory):
    """The running cluster; it ends with the tests, whatever they did."""
    ready = subprocess.run([SCRIPT, "install"], capture_output=True, text=True, timeout=300)
    if ready.returncode:
        pytest.skip(ready.stderr.strip())
    cluster = Cluster(tmp_path_factory.mktemp("cluster"))
    try:
        cluster.call("start")
        yield cluster
    finally:
        cluster.call("stop")


@pytest.fixture
def cluster(machines):
    """The cluster with nothing of an earlier test on it."""
    yield machines
    for job in machines.jobs:
        job.cancel()
    machines.jobs.clear()


@pytest.fixture(scope="session")
def settings(digits) -> list[str]:
    """The pretraining that tests disturb: config and changes; 88 steps, of some seconds on a fast machine too."""
    return [
        "configs/pretrain/mae_digits.yaml",
        f"data.path={digits}",
        "data.source=tar",
        "data.workers=1",
        "model.embed_dim=64",
        "model.depth=2",
        "objective.decoder_embed_dim=32",
        "objective.decoder_depth=1",
        "train.epochs=8",
        "train.warmup_epochs=1",
        "monitor.log_every_steps=1",
        "monitor.tensorboard=false",
        "checkpoint.every_steps=10",
    ]


@pytest.fixture(scope="session")
def undisturbed(machines, settings, tmp_path_factory) -> Path:
    """The folder of a run on both nodes that nothing happened to."""
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    job = machines.submit(folder, "--nodes=2", "slurm/pretrain.sh", *settings, f"run.dir={folder}")
    assert job.wait() == "COMPLETED", job.output()
    assert job.shown("Restarts") == "0"
    return folder
