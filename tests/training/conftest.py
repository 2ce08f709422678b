"""Pretraining runs in this process, on the torch engine."""

import pytest
from commands import ROOT
from training_runs import SMALL

from mae_vit.pretraining.job import main


@pytest.fixture
def call(digits, tmp_path):
    """Trains on the digits: call("key=value", ..., name="run"); a later data.path takes their place."""

    def run(*arguments: str, name: str = "run") -> int:
        config = str(ROOT / "configs" / "mae_digits.yaml")
        options = [*SMALL, f"data.path={digits}", f"run.dir={tmp_path / name}", f"run.name={name}"]
        return main(["--config", config, *options, *arguments])

    return run
