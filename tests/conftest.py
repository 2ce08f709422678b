"""Shared fixtures: small real data, and processes that are always cleaned up."""

import multiprocessing
import os
import shutil
import signal
import subprocess
from pathlib import Path

# Read when torch is imported, so set before it. The workers of pytest-xdist share the cores. A thread that spins
# while it waits takes the core that the other worker needs: runs of seconds then take ten times as long.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import numpy as np
import pytest
import torch
from helpers.commands import run
from helpers.images import prepare_colored_digits
from helpers.said import said  # noqa: F401  a fixture
from helpers.servers.hub_server import hub  # noqa: F401  a fixture

from mae_vit.comparison.runner import PRELOADED
from mae_vit.data.index import open_index
from mae_vit.data.prepare.in_place import index_in_place
from mae_vit.data.prepare.prepare import prepare
from mae_vit.data.prepare.publish import ShardWriter, write_description
from mae_vit.data.prepare.sources.find import find_images
from mae_vit.runtime import device

# Whichever test first starts data workers or a comparison: else each process imports torch anew in all later tests.
multiprocessing.set_forkserver_preload(PRELOADED)
# It only grows in a process that runs hundreds of trainings, to gigabytes.
device.keep_freed_memory = lambda: None


def pytest_addoption(parser):
    parser.addoption(
        "--update", action="store_true", help="rewrite tests/said.json: the sentences of the tests that run"
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    item.failed = getattr(item, "failed", False) or report.failed
    return report


def pytest_configure(config):
    # All other tests compare with a CPU, and start more ranks than a machine may have GPUs. So do not combine the mark.
    if config.option.markexpr != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no CUDA device, or not chosen by -m gpu"))


_HANDLERS = {
    number: signal.getsignal(number)
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
}


@pytest.fixture(autouse=True)
def signals_as_before():
    """A run in this process handles the signals that stop it, then ignores them; shared fixtures run some too."""
    _restore_signals()
    yield
    _restore_signals()


def _restore_signals():
    for number, handler in _HANDLERS.items():
        signal.signal(number, handler)


@pytest.fixture(autouse=True)
def no_launcher_environment(monkeypatch):
    """Each test stands for a plain shell, also inside a Slurm job or after another test."""
    for name in list(os.environ):
        if name.startswith("SLURM_") or name in (
            "RANK",
            "WORLD_SIZE",
            "LOCAL_RANK",
            "MASTER_ADDR",
            "MASTER_PORT",
        ):
            monkeypatch.delenv(name)
    # find_ranks() sets these for DeepSpeed: recorded here, so that they are taken back.
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.fixture(scope="session")
def digits(tmp_path_factory) -> Path:
    """scikit-learn's digits as shards, several of them: 8x8 gray."""
    out = tmp_path_factory.mktemp("digits")
    prepare([find_images("digits", out=out, split="train", root=None)], out, shard_samples=400)
    return out


@pytest.fixture(scope="session")
def many_shards(digits, tmp_path_factory) -> Path:
    """The same samples in 64 shards of 3 to 46."""
    out = tmp_path_factory.mktemp("many_shards")
    index = open_index(digits, "train")
    weights = np.random.default_rng(0).permutation(np.linspace(2, 38, 64))
    ends = np.round(np.cumsum(weights) / weights.sum() * len(index)).astype(int)
    with ShardWriter(out, "train", shard_bytes=1 << 30, shard_samples=0) as writer:
        for sample in range(len(index)):
            writer._shard_samples = np.diff(ends, prepend=0)[np.searchsorted(ends, sample, side="right")]
            writer.write(f"{sample:06d}", "png", index.read(sample), int(index.labels[sample]))
    test = index.dataset.splits["test"]
    for shard in test.shards:
        shutil.copy(digits / shard.file, out)
    train = index.split_info.model_copy(update={"shards": writer.shards, "index": None})
    write_description(out, index.dataset.model_copy(update={"splits": {"test": test, "train": train}}))
    index_in_place(out, overwrite=True)
    return out


@pytest.fixture(scope="session")
def colored(tmp_path_factory) -> Path:
    """scikit-learn's digits at 32 px in three colors: enough for a batch of 4096."""
    return prepare_colored_digits(tmp_path_factory.mktemp("images"), tmp_path_factory.mktemp("colored"))


@pytest.fixture
def pretrain(digits, tmp_path):
    """Runs pretrain/run.py on the digits: pretrain("key=value", ..., config="mae_digits")."""

    def call(*overrides: str, config: str = "mae_digits", **options) -> subprocess.CompletedProcess:
        return run(
            "pretrain/run.py",
            "--config",
            f"configs/{config}.yaml",
            f"data.path={digits}",
            f"run.dir={tmp_path / 'run'}",
            *overrides,
            **options,
        )

    return call
