"""Runs that experiment trackers follow: each step once after kills, and not a bit of the weights changes."""

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers.commands import ROOT, SMALL_PRETRAIN, lines_of
from helpers.trackers import stored_by_mlflow, stored_by_wandb

from mae_vit.training.outputs.trackers.mlflow_run import MlflowRun
from mae_vit.training.outputs.trackers.wandb_run import WandbRun

_SECRET = "0123456789abcdef0123456789abcdef01234567"
_BOTH = "monitor.trackers=[wandb,mlflow]"


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    """A key is set, and must appear nowhere; nothing is sent."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_API_KEY", _SECRET)
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.delenv(name, raising=False)


def files_with(text: str, folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and text.encode() in path.read_bytes()]


def refuse(*arguments, **options):
    raise RuntimeError("refused")


@pytest.mark.parametrize("fails_in", ["open", "log"])
def test_a_tracker_that_raises_changes_no_bit(call, tmp_path, monkeypatch, capsys, fails_in):
    assert call(name="off") == 0
    for tracker in (WandbRun, MlflowRun):
        monkeypatch.setattr(tracker, "__init__", refuse if fails_in == "open" else _open)
        monkeypatch.setattr(tracker, "log", refuse)
        monkeypatch.setattr(tracker, "finish", refuse)
    capsys.readouterr()
    assert call(_BOTH, name="on") == 0
    warnings = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning")]
    assert sorted(warnings) == [
        f"warning: {name} gets no more of this run: RuntimeError: refused; training continues"
        for name in ("mlflow", "wandb")
    ]
    _same_weights(tmp_path / "off", tmp_path / "on")


def _open(self, run, run_id):
    self.run_id, self.last_step, self.where = "abc", 0, ""


def _same_weights(one: Path, other: Path) -> None:
    for name in ("encoder.safetensors", "checkpoints/step-00000006/parameters.safetensors"):
        assert (one / name).read_bytes() == (other / name).read_bytes()


@pytest.mark.slow
def test_trackers_change_no_bit_and_follow_to_another_folder(call, tmp_path):
    assert call(name="off") == 0
    runs = tmp_path / "runs"
    assert call(_BOTH, f"run.dir={runs / 'on'}", "checkpoint.keep_last=9") == 0
    _same_weights(tmp_path / "off", runs / "on")
    assert files_with(_SECRET, tmp_path) == []
    # Another machine: a checkpoint alone.
    middle = tmp_path / "copied" / "step-00000004"
    shutil.copytree(runs / "on" / "checkpoints" / middle.name, middle)
    arguments = [_BOTH, f"run.dir={runs / 'moved'}", "--resume", str(middle)]
    assert call(*arguments) == 0
    ids = json.loads((runs / "moved" / "trackers.json").read_text())
    assert ids == json.loads((runs / "on" / "trackers.json").read_text())
    (stored,) = stored_by_mlflow(runs / "mlflow.db")
    assert stored.steps("train/loss") == [1, 2, 3, 4, 5, 6]
    assert stored_by_wandb(runs / "moved").steps == [5, 6]
    # A branch: the run that the checkpoint is of stays as it is.
    inside = runs / "on" / "checkpoints" / middle.name
    assert call(_BOTH, f"run.dir={runs / 'branch'}", "--resume", str(inside)) == 0
    assert not ids.items() & json.loads((runs / "branch" / "trackers.json").read_text()).items()
    assert json.loads((runs / "on" / "trackers.json").read_text()) == ids
    assert sorted(run.steps("train/loss") for run in stored_by_mlflow(runs / "mlflow.db")) == [
        [1, 2, 3, 4, 5, 6],
        [5, 6],
    ]
    assert stored_by_wandb(runs / "branch").steps == [5, 6]
    # A run in which trackers begin late has its whole course.
    assert call("train.steps=4", "--extend", name="late") == 0
    assert call("--extend", _BOTH, name="late") == 0
    assert stored_by_wandb(tmp_path / "late").steps == [1, 2, 3, 4, 5, 6]


@pytest.mark.slow
def test_three_kills_leave_one_tracked_run_each_and_no_step_twice(digits, tmp_path):
    folder, steps = tmp_path / "runs" / "mine", 60
    command = [
        *(sys.executable, "pretrain/run.py", "--config", "configs/mae_digits.yaml", *SMALL_PRETRAIN),
        *(f"data.path={digits}", f"run.dir={folder}", f"train.steps={steps}", "data.workers=0", _BOTH),
        *("checkpoint.every_steps=7", "monitor.evaluate_every_steps=5"),
    ]
    for number, reached in ((signal.SIGKILL, 10), (signal.SIGTERM, 25), (signal.SIGKILL, 40)):
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        _wait_for_step(process, folder, reached)
        process.send_signal(number)
        process.communicate(timeout=500)
        assert process.returncode == (75 if number == signal.SIGTERM else -number)
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    logged = {line["step"]: line for line in lines_of(folder)}
    every = list(range(1, steps + 1))
    assert list(logged) == every
    (stored,) = stored_by_mlflow(folder.parent / "mlflow.db")
    rows = stored_by_wandb(folder)
    assert rows.ids == {json.loads((folder / "trackers.json").read_text())["wandb"]}
    assert stored.steps("train/loss") == every
    assert rows.steps == every
    for step in every:
        assert stored.value("train/loss", step) == logged[step]["loss"]
        assert rows.values["train/loss"][step] == logged[step]["loss"]
    assert stored.steps("heldout/loss") == sorted(rows.values["heldout/loss"]) == every[4::5]
    assert (stored.status, rows.summary["summary/status"]) == ("FINISHED", "done")
    assert rows.summary["summary/loss"] == stored.value("summary/loss", steps) == logged[steps]["loss"]
    assert stored.pictures
    assert "pictures/held-out/path" in rows.values
    assert files_with(_SECRET, tmp_path) == []


def _wait_for_step(process, folder: Path, step: int) -> None:
    until = time.monotonic() + 240
    while time.monotonic() < until and process.poll() is None:
        if (folder / "metrics.jsonl").exists() and any(line["step"] >= step for line in _lines(folder)):
            return
        time.sleep(0.02)
    raise AssertionError(f"step {step} was not reached: {process.communicate()[1]}")


def _lines(folder: Path) -> list[dict]:
    try:
        return lines_of(folder)
    except ValueError:  # a line is being written
        return []
