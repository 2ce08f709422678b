"""The run folder's files, what a run prints to the terminal, and what its outputs keep over a resume."""

import json
import math
import time
from types import SimpleNamespace

import pytest

from mae_vit.config.load import load_config
from mae_vit.config.presets import find_config
from mae_vit.core.files import read_json_lines
from mae_vit.objectives.pretrain_config import PretrainConfig
from mae_vit.runtime.failures import BadStep
from mae_vit.runtime.ranks import ALONE
from mae_vit.training.outputs.run_folder import RunFolder
from mae_vit.training.outputs.run_outputs import RunOutputs


def refuse(word: str) -> None:
    raise AssertionError(f"{word} is no JSON")


def test_numbers_that_are_not_finite_are_null(tmp_path):
    folder = RunFolder(tmp_path)
    folder.append_metrics({"step": 1, "loss": math.nan, "heldout": {"psnr_db": -math.inf, "loss": 0.5}})
    lines = [json.loads(line, parse_constant=refuse) for line in folder.metrics.read_text().splitlines()]
    assert lines == [{"step": 1, "loss": None, "heldout": {"psnr_db": None, "loss": 0.5}}]
    folder.write_summary("done", {"scores": (1.5, math.inf)})
    summary = json.loads(folder.summary.read_text(), parse_constant=refuse)
    assert summary == {"status": "done", "scores": [1.5, None]}


def test_metrics_are_cut_where_they_lie_and_torn_lines_are_passed_over(tmp_path):
    """A copy would take room, which a full disk has not when a run goes back."""
    folder = RunFolder(tmp_path)
    assert folder.cut_metrics(1) is None
    for step in (1, 2, 3):
        folder.append_metrics({"step": step})
    before = folder.metrics.stat().st_ino
    assert folder.cut_metrics(2) == {"step": 2}
    assert folder.metrics.read_text() == '{"step": 1}\n{"step": 2}\n'
    with folder.metrics.open("ab") as file:
        file.write(b'{"step": 3, "lo')  # a full disk
    folder.append_metrics({"step": 4})
    assert read_json_lines(folder.metrics) == [{"step": 1}, {"step": 2}, {"step": 4}]
    assert folder.cut_metrics(3) == {"step": 2}
    assert folder.metrics.read_text() == '{"step": 1}\n{"step": 2}\n'
    assert folder.cut_metrics(0) is None
    assert folder.metrics.read_text() == ""
    assert folder.metrics.stat().st_ino == before


@pytest.fixture
def outputs_at(tmp_path):
    config = load_config(PretrainConfig, find_config("mae_digits"), ["monitor.tensorboard=false"])
    plan = SimpleNamespace(total_steps=100, effective_batch_size=4)
    return lambda step: RunOutputs(
        config, plan, RunFolder(tmp_path), ALONE, start_step=step, facts={}, damaged=()
    )


def line(step: int, rate: float = 9e9) -> dict:
    return {"step": step, "epoch": 0.1, "loss": 1.0, "lr": 1e-3, "images_per_s": rate, "wall_s": 0.0}


@pytest.mark.parametrize("start_step", [0, 5])
def test_the_first_probe_is_kept_from_whatever_step_a_run_resumes(outputs_at, tmp_path, start_step):
    """A checkpoint of step 0 is resumed from, too, and the weights are not measured again."""
    first = outputs_at(0)
    first.note_first_probe({"few_shot_top1": 0.25, "images": 40})
    first.begin(0, "starting", "")
    outputs_at(start_step).begin(start_step, "resuming", "")
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["probe_at_start"] == {"few_shot_top1": 0.25, "images": 40}


def test_the_time_left_is_that_of_the_steps_since_the_first_line(outputs_at, capsys, monkeypatch):
    outputs = outputs_at(0)
    clock = iter((1000.0, 1010.0, 1080.0, 1090.0, 1100.0))
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    printed = []
    for step in (20, 30, 50, 30, 40):
        if len(printed) == 3:
            outputs.go_back(BadStep(60, ""), 25, [(0, 1)])
            capsys.readouterr()
        outputs.log(line(step))
        printed.append(capsys.readouterr().err.partition(" eta ")[2].strip())
    # 10 s for 10 steps, 70 left; 80 s for 30, 50 left; gone back, it begins anew; 10 s for 10, 60 left.
    assert printed == ["", "0:01:10", "0:02:13", "", "0:01:00"]


def test_a_slow_rate_is_not_shown_as_none(outputs_at, capsys):
    outputs = outputs_at(0)
    rates = {193.4: "193", 12.0: "12", 9.97: "10", 8.14: "8.1", 0.34: "0.34", 0.0: "0"}
    for rate, shown in rates.items():
        outputs.log(line(5, rate))
        assert f" {shown} images/s" in capsys.readouterr().err


def test_a_log_times_the_first_step_and_a_bar_moves_with_every_step(outputs_at, capsys, monkeypatch):
    outputs = outputs_at(7)
    outputs.show_step(8, 3.21)
    outputs.show_step(9, 3.0)
    assert capsys.readouterr().err.split() == ["first", "step", "took", "3.2", "s"]
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    outputs = outputs_at(0)
    monkeypatch.setattr(outputs._bar, "mininterval", 0)
    for step in (1, 2):
        outputs.show_step(step, 1.0)
        assert f" {step}/100 [" in capsys.readouterr().err.split("\r")[-1]
    outputs.end("done", 2)
