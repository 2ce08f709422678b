"""What a run prints to the terminal."""

import time

import pytest

from mae_vit.training.outputs.monitor import Monitor
from mae_vit.training.outputs.run_folder import RunFolder
from mae_vit.training.outputs.trackers.registry import RunTrackers


def test_the_time_left_is_that_of_the_steps_since_the_first_line(tmp_path, capsys, monkeypatch):
    monitor = Monitor(RunFolder(tmp_path), RunTrackers(), start_step=0, total_steps=100)
    clock = iter((1000.0, 1010.0, 1080.0, 1090.0, 1100.0))
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    said = []
    for step in (20, 30, 50, 30, 40):
        if len(said) == 3:
            monitor.go_back(25)
        line = {"step": step, "epoch": 0.1, "loss": 1.0, "lr": 1e-3, "images_per_s": 9e9}
        monitor.log_step(line)
        said.append(capsys.readouterr().err)
    assert "eta" not in said[0]
    assert "eta 0:01:10" in said[1]  # 10 s for 10 steps, 70 left
    assert "eta 0:02:13" in said[2]  # 80 s for 30 steps, 50 left
    assert "eta" not in said[3]  # gone back: it begins anew
    assert "eta 0:01:00" in said[4]  # 10 s for 10 steps, 60 left


@pytest.mark.parametrize(
    ("rate", "shown"), [(193.4, "193"), (12.0, "12"), (9.97, "10"), (8.14, "8.1"), (0.34, "0.34"), (0.0, "0")]
)
def test_a_slow_rate_is_not_shown_as_none(rate, shown, tmp_path, capsys):
    monitor = Monitor(RunFolder(tmp_path), RunTrackers(), start_step=0, total_steps=100)
    monitor.log_step({"step": 5, "epoch": 0.1, "loss": 1.0, "lr": 1e-3, "images_per_s": rate})
    assert f" {shown} images/s" in capsys.readouterr().err


def test_a_log_says_how_long_the_first_step_took_and_no_other(tmp_path, capsys):
    monitor = Monitor(RunFolder(tmp_path), RunTrackers(), start_step=7, total_steps=100)
    monitor.show_step(8, 3.21)
    monitor.show_step(9, 3.0)
    assert capsys.readouterr().err == "first step took 3.2 s\n"


def test_a_bar_moves_with_every_step(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monitor = Monitor(RunFolder(tmp_path), RunTrackers(), start_step=0, total_steps=100)
    monkeypatch.setattr(monitor._bar, "mininterval", 0)
    for step in (1, 2):
        monitor.show_step(step, 1.0)
        assert f" {step}/100 [" in capsys.readouterr().err.split("\r")[-1]
    monitor.close("done", {})
