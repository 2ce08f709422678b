"""Runs that experiment trackers follow: one tracked run over kills, and not a bit of the weights changes."""

import json
import signal
from pathlib import Path

import pytest
from distributed.launch import Run, finished
from helpers.commands import SMALL_PRETRAIN, lines_of
from helpers.trackers import stored_by_mlflow, wandb_ids

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


def same_weights(run: Path, other: Path) -> None:
    for name in ("encoder.safetensors", "checkpoints/step-00000006/parameters.safetensors"):
        assert (run / name).read_bytes() == (other / name).read_bytes()


@pytest.mark.slow
def test_trackers_change_no_bit_and_a_branch_is_a_run_of_its_own(call, tmp_path):
    assert call(name="off") == 0
    runs = tmp_path / "runs"
    assert call(_BOTH, f"run.dir={runs / 'on'}", "checkpoint.keep_last=9") == 0
    same_weights(tmp_path / "off", runs / "on")
    assert files_with(_SECRET, tmp_path) == []
    ids = json.loads((runs / "on" / "trackers.json").read_text())
    middle = runs / "on" / "checkpoints" / "step-00000004"
    assert call(_BOTH, f"run.dir={runs / 'branch'}", "--resume", str(middle)) == 0
    assert not ids.items() & json.loads((runs / "branch" / "trackers.json").read_text()).items()
    assert json.loads((runs / "on" / "trackers.json").read_text()) == ids
    steps = [[step for step, _ in run.values("train/loss")] for run in stored_by_mlflow(runs / "mlflow.db")]
    assert sorted(steps) == [[1, 2, 3, 4, 5, 6], [5, 6]]
    # `--resume never` begins a new tracked run in the same folder.
    assert call(_BOTH, f"run.dir={runs / 'on'}", "--resume", "never") == 0
    assert not ids.items() & json.loads((runs / "on" / "trackers.json").read_text()).items()


@pytest.mark.slow
def test_kills_leave_one_tracked_run(digits, tmp_path):
    folder, steps = tmp_path / "runs" / "mine", 40
    folder.parent.mkdir()
    options = [
        *("--config", "configs/pretrain/mae_digits.yaml", *SMALL_PRETRAIN, f"data.path={digits}", _BOTH),
        *(
            f"train.steps={steps}",
            "data.workers=0",
            "checkpoint.every_steps=7",
            "monitor.evaluate_every_steps=5",
        ),
    ]
    for number, reached in ((signal.SIGKILL, 10), (signal.SIGTERM, 25)):
        with Run(folder, "python", 1, options) as run:
            run.wait_for_step(reached)
            run.process.send_signal(number)
            assert run.wait() == (75 if number == signal.SIGTERM else -number)
    finished(folder, "python", 1, options)
    losses = {line["step"]: line["loss"] for line in lines_of(folder)}
    assert list(losses) == list(range(1, steps + 1))
    (stored,) = stored_by_mlflow(folder.parent / "mlflow.db")
    # Steps that came again have the same value.
    assert set(stored.values("train/loss")) == set(losses.items())
    assert {step for step, _ in stored.values("heldout/loss")} == set(range(5, steps + 1, 5))
    assert stored.status == "FINISHED"
    assert stored.pictures
    assert set(wandb_ids(folder)) == {json.loads((folder / "trackers.json").read_text())["wandb"]}
    assert files_with(_SECRET, tmp_path) == []
