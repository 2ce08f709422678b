"""What only a GPU can show."""

import json
from pathlib import Path

import pytest
from helpers.commands import lines_of, run

pytestmark = pytest.mark.gpu

SMALL = [
    *("--config", "configs/pretrain/mae_digits.yaml", "train.engine=torch", "train.steps=30"),
    *("train.warmup_steps=5", "monitor.log_every_steps=1", "monitor.evaluate_every_steps=15"),
    *("monitor.tensorboard=false", "run.name=same"),
]


def encoder_of(folder: Path, digits: Path, *options: str) -> bytes:
    done = run("pretrain/run.py", *SMALL, f"data.path={digits}", f"run.dir={folder}", *options)
    assert done.returncode == 0, done.stderr
    return (folder / "encoder.safetensors").read_bytes()


@pytest.mark.parametrize("objective", ["mae", "masked_patch"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_deterministic_runs_are_equal_byte_for_byte(digits, tmp_path, precision, objective):
    options = ["run.deterministic=true", f"train.precision={precision}"]
    if objective == "masked_patch":
        options[:0] = ["--config", "configs/pretrain/masked_patch_digits.yaml"]
    first, second = (encoder_of(tmp_path / name, digits, *options) for name in ("first", "second"))
    assert first == second


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_losses_are_those_of_a_cpu(digits, tmp_path, precision, monkeypatch):
    losses = {}
    for place in ("gpu", "cpu"):
        if place == "cpu":
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        encoder_of(tmp_path / place, digits, f"train.precision={precision}")
        environment = json.loads((tmp_path / place / "environment.json").read_text())
        assert bool(environment["gpus"]) == (place == "gpu")
        losses[place] = [line["loss"] for line in lines_of(tmp_path / place)]
    assert losses["gpu"] == pytest.approx(losses["cpu"], rel=1e-4 if precision == "fp32" else 1e-2)


@pytest.mark.parametrize("objective", ["mae", "masked_patch", "simmim"])
def test_compiled_losses_are_those_of_plain_steps(digits, tmp_path, objective):
    preset = ["--config", f"configs/pretrain/{objective}_digits.yaml"]
    losses = {}
    for compiled in ("true", "false"):
        folder = tmp_path / compiled
        encoder_of(folder, digits, *preset, "train.precision=fp32", f"train.compile={compiled}")
        losses[compiled] = [line["loss"] for line in lines_of(folder)]
    assert losses["true"] == pytest.approx(losses["false"], rel=1e-4)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_zero_on_a_gpu(digits, tmp_path, stage):
    options = ["train.engine=deepspeed", f"train.zero_stage={stage}", "train.precision=fp16"]
    encoder_of(tmp_path / "run", digits, *options)
