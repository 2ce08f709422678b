"""Experiment trackers: what is sent, what is not sent twice, and what a failing one does."""

import importlib.util
import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from helpers.commands import ROOT, one_line
from helpers.trackers import stored_by_mlflow, stored_by_wandb

from mae_vit.config.load import load_config
from mae_vit.objectives.pretrain_config import PretrainConfig
from mae_vit.training.outputs.run_folder import RunFolder
from mae_vit.training.outputs.trackers.background import BackgroundTracker
from mae_vit.training.outputs.trackers.base import TrackedRun
from mae_vit.training.outputs.trackers.mlflow_run import MlflowRun
from mae_vit.training.outputs.trackers.names import scalars_of
from mae_vit.training.outputs.trackers.open import adopt_ids, check_installed, describe_run, read_ids
from mae_vit.training.outputs.trackers.wandb_run import WandbRun, last_step_in, steps_in


class Store:
    """Takes the place of a package that fails, hangs or holds steps already."""

    where = "here"

    def __init__(self, last_step=0, error=None):
        self.run_id, self.last_step, self.error = "abc", last_step, error
        self.rows, self.summary = [], None

    def log(self, step, scalars, pictures):
        if self.error:
            raise self.error
        self.rows.append((step, scalars, sorted(pictures)))

    def finish(self, status, summary):
        self.summary = (status, summary)


def background(open_run, said, *, logged_step=0, patience_s=20.0):
    return BackgroundTracker(
        "wandb", open_run, logged_step=logged_step, say=said.append, patience_s=patience_s
    )


def test_a_step_is_sent_once_after_a_rollback_too():
    store, said = Store(last_step=3), []
    tracker = background(lambda: store, said)
    for step in (3, 4, 5):
        tracker.log(step, {"train/loss": float(step)}, {"p": np.zeros((2, 2, 3), np.uint8)})
    tracker.go_back(4)
    for step in (5, 6, 7):
        tracker.log(step, {"train/loss": 0.5}, {})
    tracker.finish("done", {"steps": 7})
    assert [row[0] for row in store.rows] == [4, 5, 6, 7]
    assert store.rows[0] == (4, {"train/loss": 4.0}, ["p"])
    # The first attempt's value stands at step 5; the rollback is marked at the first step after it.
    assert store.rows[1][1] == {"train/loss": 5.0}
    assert store.rows[2][1] == {"train/loss": 0.5, "guard/went_back_to_step": 4}
    assert store.rows[3][1] == {"train/loss": 0.5}
    assert store.summary == ("done", {"steps": 7})
    assert said == []


@pytest.mark.parametrize(("last_step", "sent"), [(None, [6]), (0, [4, 5, 6]), (4, [5, 6])])
def test_the_tracker_says_what_it_lacks(last_step, sent):
    """Where it cannot say, all that was logged before this start is taken for sent."""
    store = Store(last_step)
    tracker = background(lambda: store, [], logged_step=5)
    for step in (4, 5, 6):
        tracker.log(step, {}, {})
    tracker.finish("done", {})
    assert [row[0] for row in store.rows] == sent


@pytest.mark.parametrize("when", ["open", "log"])
def test_a_failing_tracker_is_one_warning_without_a_secret(when, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "key-of-mine")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://me:word-of-mine@host")
    error = SystemExit("refused: key-of-mine at https://me:word-of-mine@host\nmore")

    def open_run():
        if when == "open":
            raise error
        return Store(error=error)

    said = []
    tracker = background(open_run, said)
    for step in range(1, 5):
        tracker.log(step, {}, {})
    tracker.finish("done", {})
    assert said == [
        "warning: wandb gets no more of this run: SystemExit: refused: *** at https://***@host; training continues"
    ]
    assert (tracker.run_id is None) == (when == "open")


def test_a_hanging_tracker_delays_the_start_by_a_bounded_time():
    ever, said = threading.Event(), []
    tracker = background(ever.wait, said, patience_s=0.05)
    tracker.log(1, {}, {})
    tracker.finish("done", {})
    ever.set()
    assert said == [
        "warning: wandb gets no more of this run: it did not open within 0.05 s; training continues"
    ]


def test_a_tracker_that_hangs_later_delays_the_end_by_a_bounded_time():
    ever, said, store = threading.Event(), [], Store()
    store.log = lambda *row: ever.wait()
    tracker = background(lambda: store, said, patience_s=0.05)
    for step in range(1, 4):
        tracker.log(step, {}, {})
    tracker.finish("done", {})
    ever.set()
    assert said == [
        "warning: wandb gets no more of this run: it did not take all within 0.05 s of the end; training continues"
    ]


def test_names_are_tensorboards():
    line = {"step": 3, "epoch": 0.5, "samples": 9, "wall_s": 1.0, "loss": 2.0, "grad_norm": None, "lr": 0.1}
    line |= {"images_per_s": 5.0, "label_loss": 1.5, "heldout": {"loss": 2.5}, "probe": {"knn_top1": 0.5}}
    assert scalars_of(line) == {
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
    return TrackedRun("mine", "all", folder, {"run.seed": 1, **{f"a.{n}": n for n in range(120)}})


_PICTURE = np.full((8, 12, 3), 200, np.uint8)
_SUMMARY = {"steps": 4, "heldout": {"loss": 0.25}, "note": "text"}


def write(open_run, run, run_id, steps):
    stored = open_run(run, run_id)
    for step in steps:
        pictures = {"pictures/held-out": _PICTURE} if step == 2 else {}
        stored.log(step, {"train/loss": 1 / step, "optimizer/lr": 0.1}, pictures)
    stored.finish("done" if 4 in steps else "interrupted", _SUMMARY)
    return stored


def test_mlflow_resumes_in_its_run(run):
    first = write(MlflowRun, run, None, (1, 2))
    second = write(MlflowRun, run, first.run_id, (3, 4))
    assert (first.last_step, second.last_step, second.run_id) == (0, 2, first.run_id)
    (stored,) = stored_by_mlflow(run.folder.parent / "mlflow.db")
    assert stored.steps("train/loss") == [1, 2, 3, 4]
    assert stored.steps("summary/heldout/loss") == [4]
    assert (stored.status, stored.name, stored.group) == ("FINISHED", "mine", "all")
    assert len(stored.parameters) == 121
    assert len([name for name in stored.pictures if name.endswith(".png")]) == 1
    # A store that does not know the run, as on another machine: a new run.
    third = MlflowRun(run, "0" * 32)
    assert (third.run_id not in (first.run_id, "0" * 32), third.last_step) == (True, 0)


def test_wandb_resumes_in_its_run(run):
    first = write(WandbRun, run, None, (1, 2))
    time.sleep(1.1)  # it names folders by the second
    second = write(WandbRun, run, first.run_id, (3, 4))
    assert (first.last_step, second.last_step, second.run_id) == (0, 2, first.run_id)
    # A process of wandb's writes behind us: on a busy machine it may still do so.
    until = time.monotonic() + 500
    while (stored := stored_by_wandb(run.folder)).steps != [1, 2, 3, 4] and time.monotonic() < until:
        time.sleep(0.2)
    assert stored.ids == {first.run_id}
    assert stored.steps == [1, 2, 3, 4]
    assert (stored.name, stored.group) == ("mine", "all")
    assert stored.values["train/loss"] == {1: 1.0, 2: 0.5, 3: 1 / 3, 4: 0.25}
    assert list(stored.values["pictures/held-out/path"]) == [2]
    assert stored.summary["summary/heldout/loss"] == 0.25
    assert last_step_in(run.folder / "wandb", "another") is None
    # A file that a kill cut short holds the rows before.
    path = sorted((run.folder / "wandb").glob("offline-run-*/*.wandb"))[0]
    whole = path.read_bytes()
    found = []
    for share in range(10):
        path.write_bytes(whole[: len(whole) * share // 10])
        found.append(steps_in(path))
    # How many bytes follow a row depends on how long the run took: wandb adds what the machine did.
    assert found[0] == []
    assert found == sorted(found)
    assert all(steps == [1, 2][: len(steps)] for steps in found)
    path.write_bytes(b"something else")
    with pytest.raises(ValueError, match="unknown layout"):
        steps_in(path)


def test_a_package_that_is_missing_is_one_line(monkeypatch, capsys, tmp_path, digits):
    from mae_vit.pretraining.command import main

    find = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec",
        lambda name, package=None: None if name == "wandb" else find(name, package),
    )
    check_installed(["mlflow"])
    config = ["--config", str(ROOT / "configs" / "mae_digits.yaml"), f"run.dir={tmp_path / 'run'}"]
    assert main([*config, f"data.path={digits}", "monitor.trackers=[wandb]"]) == 2
    assert (
        one_line(capsys)
        == "error: monitor.trackers: wandb needs the package wandb: pip install 'mae-vit[wandb]'"
    )
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["monitor.trackers=[wandb,wandb]"], "names one twice"),
        (["monitor.tracker_group=a"], 'tracker_group="a" has no effect without trackers'),
        (["monitor.trackers=[wand]"], "wandb"),
        (["monitor.inspect_every_epochs=1", "monitor.tensorboard=false"], "has no effect"),
    ],
)
def test_options_without_an_effect_are_refused(options, message):
    with pytest.raises(ValueError, match=message.replace("[", r"\[")):
        load_config(PretrainConfig, ROOT / "configs" / "mae_digits.yaml", options)


def test_what_trackers_are_sent_has_no_credentials(tmp_path):
    url = "https://me:secret@host/data?token=secret"
    options = [f"data.path={url}", f"run.dir={tmp_path / 'cells' / 'seed-0'}", "monitor.trackers=[wandb]"]
    config = load_config(PretrainConfig, ROOT / "configs" / "mae_digits.yaml", options)
    run = describe_run(config, RunFolder(Path(config.run.dir)))
    assert run.config["data.path"] == "https://host/data"
    assert "secret" not in str(run.config)
    assert (run.name, run.group) == ("mae_digits", None)
    options.append("monitor.tracker_group=study")
    config = load_config(PretrainConfig, ROOT / "configs" / "mae_digits.yaml", options)
    run = describe_run(config, RunFolder(Path(config.run.dir)))
    assert (run.name, run.group) == ("cells/seed-0", "study")


def test_ids_come_from_the_folder_then_from_the_checkpoint(tmp_path):
    folder = RunFolder(tmp_path)
    adopt_ids(folder, {"wandb": "abc"})
    assert read_ids(folder) == {"wandb": "abc"}
    adopt_ids(folder, {"wandb": "older"})
    assert read_ids(folder) == {"wandb": "abc"}
    adopt_ids(folder, None)
    assert read_ids(folder) == {}
    folder.trackers.write_text(json.dumps({"wandb": "../../x", "other": "abc", "mlflow": "a1"}))
    assert read_ids(folder) == {"mlflow": "a1"}


@pytest.mark.slow
def test_trackers_are_imported_where_they_are_opened_alone():
    # None makes an import fail. timm itself imports wandb where it is installed, and does without.
    blocked = "import sys; sys.modules.update(wandb=None, mlflow=None)"
    code = f"{blocked}; import mae_vit.pretraining.job, mae_vit.finetuning.job"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
