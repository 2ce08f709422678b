"""Pretraining runs in this process, on the torch engine."""

import pytest
from commands import ROOT, SMALL_MAE

from pretrain.job import main

SMALL = [
    *SMALL_MAE,
    "train.steps=6",
    "train.warmup_steps=1",
    "monitor.log_every_steps=1",
    "monitor.evaluate_every_steps=3",
    "monitor.evaluate_images=32",
    "monitor.tensorboard=false",
    "checkpoint.every_steps=2",
]


@pytest.fixture
def call(digits, tmp_path):
    """Trains on the digits: call("key=value", ..., name="run"); a later data.path takes their place."""

    def run(*arguments: str, name: str = "run") -> int:
        config = str(ROOT / "configs" / "mae_digits.yaml")
        options = [*SMALL, f"data.path={digits}", f"run.dir={tmp_path / name}", f"run.name={name}"]
        return main(["--config", config, *options, *arguments])

    return run
