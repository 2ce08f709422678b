"""Pretraining runs in this process, on the torch engine."""

import numpy as np
import pytest
from helpers.commands import ROOT, SMALL_PRETRAIN

from mae_vit.pretraining.command import main
from mae_vit.training.engines.torch_engine import TorchEngine


@pytest.fixture
def call(digits, tmp_path):
    """Trains on the digits: call("key=value", ..., name="run"); a later data.path takes their place."""

    def run(*arguments: str, name: str = "run") -> int:
        config = str(ROOT / "configs" / "pretrain" / "mae_digits.yaml")
        options = [*SMALL_PRETRAIN, f"data.path={digits}", f"run.dir={tmp_path / name}", f"run.name={name}"]
        return main(["--config", config, *options, *arguments])

    return run


@pytest.fixture
def encoder(tmp_path):
    """The bytes of a run's encoder, by the run's name."""
    return lambda name="run": (tmp_path / name / "encoder.safetensors").read_bytes()


@pytest.fixture
def checkpoint(tmp_path):
    """The folder of a run's checkpoint, by the run's name and a step."""
    return lambda name, step: tmp_path / name / "checkpoints" / f"step-{step:08d}"


@pytest.fixture
def poison(monkeypatch):
    """poison(factor, when) multiplies the loss of batches: when(samples) is asked; returns all samples seen."""
    forward, seen = TorchEngine.forward, []

    def start(factor: float, when) -> list[np.ndarray]:
        def poisoned(self, batch):
            samples = batch.keys.index.numpy()
            seen.append(samples)
            output = forward(self, batch)
            return output._replace(loss=output.loss * factor) if when(samples) else output

        monkeypatch.setattr(TorchEngine, "forward", poisoned)
        return seen

    return start
