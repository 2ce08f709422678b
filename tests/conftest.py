"""Shared fixtures: small real data, and processes that are always cleaned up."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mae_vit.data.prepare import prepare
from mae_vit.data.sources import open_source

ROOT = Path(__file__).resolve().parents[1]


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


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
    """scikit-learn's digits as shards, several of them: 8x8 grey."""
    out = tmp_path_factory.mktemp("digits")
    prepare([open_source("digits", out=out, split="train", root=None)], out, shard_samples=400)
    return out


def run(*arguments: str, timeout: float = 120, **options) -> subprocess.CompletedProcess:
    """Runs a command of ours with this interpreter."""
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=timeout, cwd=ROOT, **options
    )


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
