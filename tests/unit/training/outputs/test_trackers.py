"""Experiment trackers: what they are sent, how a run resumes in them, and what a failing one does."""

import importlib.util
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from helpers.commands import ROOT, one_line
from helpers.trackers import stored_by_mlflow, wandb_ids

from mae_vit.config.load import load_config
from mae_vit.config.schema import TRACKERS
from mae_vit.core.errors import InputError
from mae_vit.objectives.pretrain_config import PretrainConfig
from mae_vit.training.outputs.experiments import MlflowTracker, WandbTracker
from mae_vit.training.outputs.run_folder import RunFolder
from mae_vit.training.outputs.trackers import (
    RunTrackers,
    TrackedRun,
    check_installed,
    open_trackers,
    shown_scalars,
)

CONFIG = ROOT / "configs" / "pretrain" / "mae_digits.yaml"


class Store:
    """A tracker that keeps what it gets; `error` is raised by each call."""

    title, where = "wandb", "here"

    def __init__(self, run, error=None):
        self.run_id, self.rows, self.error = run.run_id or "new", [], error

    def log(self, step, scalars, pictures):
        if self.error:
            raise self.error
        self.rows.append(step)

    go_back = finish = log


def opened(folder: Path, tracker, monkeypatch, *more: str) -> RunTrackers:
    monkeypatch.setitem(TRACKERS, "wandb", tracker)
    overrides = [f"run.dir={folder}", "monitor.trackers=[wandb]", "monitor.tensorboard=false", *more]
    return open_trackers(load_config(PretrainConfig, CONFIG, overrides), RunFolder(folder), start_step=3)


def test_a_new_tracked_run_gets_the_earlier_lines_and_a_resumed_one_does_not(tmp_path, monkeypatch):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n{"step": 3, "loss": 1.0}\n')
    stores = []
    for _ in range(2):
        trackers = opened(tmp_path, lambda run: stores.append(Store(run)) or stores[-1], monkeypatch)
        trackers.each(lambda tracker: tracker.log(4, {}, {}))
    assert [store.rows for store in stores] == [[1, 3, 4], [4]]
    assert [store.run_id for store in stores] == ["new", "new"]


@pytest.mark.parametrize("when", ["open", "log"])
def test_a_failing_tracker_is_one_warning_without_a_secret(when, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("WANDB_API_KEY", "key-of-mine")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://me:word-of-mine@host")
    error = SystemExit("refused: key-of-mine at https://me:word-of-mine@host\nmore")

    def tracker(run):
        if when == "open":
            raise error
        return Store(run, error)

    trackers = opened(tmp_path, tracker, monkeypatch)
    for step in range(4, 7):
        trackers.each(lambda tracker, step=step: tracker.log(step, {}, {}))
    (line,) = capsys.readouterr().err.splitlines()
    assert "wandb" in line
    assert "*** at https://***@host" in line
    assert trackers.trackers == []


def test_names_are_tensorboards():
    line = {"step": 3, "epoch": 0.5, "samples": 9, "wall_s": 1.0, "loss": 2.0, "grad_norm": None, "lr": 0.1}
    line |= {"images_per_s": 5.0, "label_loss": 1.5, "heldout": {"loss": 2.5}, "probe": {"knn_top1": 0.5}}
    assert shown_scalars(line) == {
        "train/loss": 2.0,
        "train/label_loss": 1.5,
        "optimizer/lr": 0.1,
        "speed/images_per_s": 5.0,
        "heldout/loss": 2.5,
        "probe/knn_top1": 0.5,
    }


@pytest.fixture
def run(tmp_path, monkeypatch):
    for name in ("WANDB_API_KEY", "MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_MODE", "offline")
    folder = tmp_path / "runs" / "mine"
    folder.mkdir(parents=True)
    return TrackedRun("mine", folder, {"run.seed": 1, **{f"a.{n}": n for n in range(120)}})


_SUMMARY = {"steps": 4, "heldout": {"loss": 0.25}, "note": "text", "nothing": None}


def write(tracker, steps):
    for step in steps:
        pictures = {"pictures/held-out": np.full((8, 12, 3), 200, np.uint8)} if step == 2 else {}
        tracker.log(step, {"train/loss": 1 / step}, pictures)
    tracker.finish("done" if 4 in steps else "interrupted", _SUMMARY)
    return tracker


def test_mlflow_resumes_in_its_run(run):
    first = MlflowTracker(run)
    first.go_back(1)
    write(first, (1, 2))
    assert write(MlflowTracker(replace(run, run_id=first.run_id)), (2, 3, 4)).run_id == first.run_id
    (stored,) = stored_by_mlflow(run.folder.parent / "mlflow.db")
    assert [step for step, _ in stored.values("train/loss")] == [1, 2, 2, 3, 4]
    assert stored.values("summary/heldout/loss") == [(4, 0.25)]
    assert stored.values("guard/went_back_to_step") == [(2, 1.0)]
    assert (stored.status, stored.name) == ("FINISHED", "mine")
    assert len(stored.parameters) == 121
    assert len([name for name in stored.pictures if name.endswith(".png")]) == 2  # of both attempts at step 2
    # A store that does not know the run, as on another machine: a new run.
    assert MlflowTracker(replace(run, run_id="0" * 32)).run_id not in (first.run_id, "0" * 32)


def test_wandb_resumes_in_its_run(run):
    first = write(WandbTracker(run), (1, 2))
    assert write(WandbTracker(replace(run, run_id=first.run_id)), (2, 3, 4)).run_id == first.run_id
    assert set(wandb_ids(run.folder)) == {first.run_id}
    assert first.where == f"wandb sync {run.folder / 'wandb'}/offline-run-*"


@pytest.mark.parametrize("login", [False, True])
def test_wandb_gets_rows_over_the_step_and_the_summary(run, monkeypatch, login):
    import wandb

    asked, calls = {}, []
    stub = SimpleNamespace(
        id="abc",
        url="https://wandb.ai/me" if login else None,
        summary={},
        define_metric=lambda name, step_metric: calls.append((name, step_metric)),
        log=calls.append,
        mark_preempting=lambda: calls.append("preempting"),
        finish=lambda exit_code: calls.append(exit_code),
    )
    monkeypatch.delenv("WANDB_MODE")
    # Without a login it must not ask for one.
    monkeypatch.setattr(wandb, "login", lambda *, prompt, verify: login and not prompt)
    monkeypatch.setattr(wandb, "init", lambda **options: asked.update(options) or stub)
    tracker = WandbTracker(replace(run, run_id="abc"))
    tracker.log(3, {"train/loss": 0.5}, {})
    tracker.go_back(2)
    tracker.finish("interrupted", _SUMMARY)
    rows = [{"step": 3, "train/loss": 0.5}, {"step": 3, "guard/went_back_to_step": 2}]
    assert calls == [("*", "step"), *rows, "preempting", 75]
    assert asked["mode"] == (None if login else "offline")
    assert (asked["id"], asked["resume"]) == ("abc", "allow")
    assert stub.summary["summary/heldout/loss"] == 0.25
    assert stub.summary["summary/status"] == "interrupted"


def test_a_package_that_is_missing_is_one_line(monkeypatch, capsys, tmp_path, digits):
    from mae_vit.pretraining.command import main

    find, gone = importlib.util.find_spec, ("wandb", "alembic")
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *_: None if name in gone else find(name, *_))
    with pytest.raises(InputError, match="alembic"):
        check_installed(["mlflow"])
    config = ["--config", str(CONFIG), f"run.dir={tmp_path / 'run'}"]
    assert main([*config, f"data.path={digits}", "monitor.trackers=[wandb]"]) == 2
    assert "'mae-vit[wandb]'" in one_line(capsys)
    assert not (tmp_path / "run").exists()


def test_what_trackers_are_sent_has_no_credentials(tmp_path, monkeypatch):
    runs = []
    url = "data.path=https://me:secret@host/data?token=secret"
    opened(tmp_path, lambda run: runs.append(run) or Store(run), monkeypatch, url)
    (run,) = runs
    assert run.config["data.path"] == "https://host/data"
    assert "secret" not in str(run.config)
    assert run.name == "mae_digits"
