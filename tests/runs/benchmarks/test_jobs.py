"""Figures of `python -m benchmarks.gpu`: a line each as it comes, whatever breaks, and none twice."""

import json
import re
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from helpers.commands import ROOT
from workers.benchmark_job import tell

from benchmarks.gpu.__main__ import PARTS, choose_keys, main
from benchmarks.gpu.jobs import Job, run_jobs
from benchmarks.gpu.lines import Identity, Lines, read_lines
from benchmarks.gpu.needs import PROJECT, check_needs, find_missing
from benchmarks.gpu.parts.parity import compare_losses
from benchmarks.gpu.parts.rates import largest_that_fits
from benchmarks.gpu.pictures import Kind, draw, make_images
from benchmarks.gpu.report import write_report
from benchmarks.gpu.telemetry import Telemetry
from mae_vit.core.errors import InputError

HERE = Identity("c0ffee", "0123456789ab", "a processor", True)


def keys_of(lines: Lines) -> list[str]:
    return [line["key"] for line in read_lines(lines.path)]


def test_a_figure_that_is_there_is_not_measured_again(tmp_path):
    lines = Lines(tmp_path, "waits", HERE)
    lines.append("a", {"value": 1})
    lines.append("b", {"failed": "out of memory"})
    Lines(tmp_path, "waits", Identity("c0ffee", "another00000", "a processor", True)).append(
        "d", {"value": 1}
    )
    account = run_jobs([Job("all", ("a", "b", "d"), tell)], lines, limit_s=60)
    assert not account.failed
    assert not account.left
    assert keys_of(lines) == ["a", "b", "d", "b", "d"]
    assert read_lines(lines.path)[-1]["value"] == 2
    assert run_jobs([Job("all", ("a", "b", "d"), tell)], lines, limit_s=0).left == []


@pytest.mark.parametrize(
    ("then", "limit_s", "reason"),
    [
        ("fail", 60, "ValueError: no luck"),
        ("die", 60, "its process ended with exit code -9"),
    ],
)
def test_what_breaks_loses_its_own_figures_alone(tmp_path, then, limit_s, reason):
    lines = Lines(tmp_path, "rates", HERE)
    jobs = [Job("broken", ("a", "b"), partial(tell, then=then), limit_s=limit_s), Job("sound", ("e",), tell)]
    account = run_jobs(jobs, lines, limit_s=120)
    assert account.failed == {"b": reason}
    assert keys_of(lines) == ["a", "b", "e"]
    assert read_lines(lines.path)[1]["failed"] == reason


def test_what_hangs_is_ended_with_all_that_it_started(tmp_path):
    lines = Lines(tmp_path, "rates", HERE)
    job = Job("hanging", ("a", "b"), partial(tell, then="hang"), limit_s=8)
    assert run_jobs([job], lines, limit_s=120).failed == {"b": "not measured within 8 s"}
    by_key = {line["key"]: line for line in read_lines(lines.path)}
    assert list(by_key) == ["a", "started", "b"]
    assert by_key["b"]["after_s"] < 60
    process = Path(f"/proc/{by_key['started']['pid']}/stat")
    assert not process.exists() or process.read_text().split()[2] == "Z"


def test_a_part_ends_in_time_and_says_what_is_left(tmp_path):
    lines = Lines(tmp_path, "rates", HERE)
    account = run_jobs([Job("all", ("a", "b"), tell)], lines, limit_s=1)
    assert account.left == ["a", "b"]
    assert not lines.path.exists()


def test_a_figure_beyond_its_bound_is_kept_and_named(tmp_path):
    account = run_jobs([Job("all", ("c",), tell)], lines := Lines(tmp_path, "parity", HERE), limit_s=60)
    assert list(account.failed) == ["c"]
    assert lines.known() == {"c"}


def test_a_torn_line_is_passed_over(tmp_path):
    lines = Lines(tmp_path, "save", HERE)
    lines.append("a", {"value": 1})
    with lines.path.open("a") as file:
        file.write('{"key": "b", "val')
    lines.append("c", {"value": float("nan")})
    assert lines.known() == {"a", "c"}


def test_memory_that_is_too_small_halves_the_batch():
    tried = []

    def measure(batch_size):
        tried.append(batch_size)
        if batch_size > 20:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return "measured"

    assert largest_that_fits(64, measure) == (16, "measured")
    assert tried == [64, 32, 16]
    with pytest.raises(torch.OutOfMemoryError):
        largest_that_fits(4, lambda size: measure(64))


def test_losses_are_compared_by_the_largest_difference():
    assert compare_losses([1.0, 2.0], [1.0, 2.00001], 1e-5)["met"]
    far = compare_losses([1.0, 2.0], [1.1, 2.0], 1e-5)
    assert not far["met"]
    assert far["largest_difference"] == 0.1
    assert not compare_losses([1.0, 2.0], [1.0, float("nan")], 1e-5)["met"]


def test_all_that_is_missing_is_named_at_once(monkeypatch):
    monkeypatch.setattr("benchmarks.gpu.needs.OF_PARTS", {"feed": ("no-such-one", "nor_this")})
    with pytest.raises(InputError, match=r"not installed here: no-such-one, nor-this\. ") as error:
        check_needs(["feed"])
    assert "\n" not in str(error.value)


def test_needs_of_needs_are_looked_up(monkeypatch):
    from importlib import metadata

    needs = {"deepspeed": ["hjson", "gone>=1", 'elsewhere; extra == "dev"'], "hjson": None}

    def requires(name):
        if name not in needs:
            raise metadata.PackageNotFoundError(name)
        return needs[name]

    monkeypatch.setattr(metadata, "requires", requires)
    assert find_missing(["deepspeed"]) == ["gone"]


def test_what_is_looked_up_is_what_the_project_needs():
    needed = (ROOT / "pyproject.toml").read_text().partition("dependencies = [")[2].partition("\n]")[0]
    assert list(PROJECT) == re.findall(r'^    "([\w.-]+)>=', needed, re.MULTILINE)


def test_images_have_the_size_of_photographs_and_come_back_equal(tmp_path):
    made = make_images(tmp_path, Kind(3, 500, 375, "jpg"))
    assert len(list(tmp_path.glob("train/*/*.jpg"))) == 3
    assert 90_000 < made / 3 < 130_000
    assert (draw(5, 16, 24) == draw(5, 16, 24)).all()
    assert (draw(5, 16, 24) != draw(6, 16, 24)).any()


def test_figures_are_chosen_by_pattern():
    jobs = [Job("one", ("B/16 ours", "B/16 theirs"), tell), Job("two", ("L/16 ours",), tell)]
    chosen = choose_keys(jobs, ["*ours"])
    assert [job.keys for job in chosen] == [("B/16 ours",), ("L/16 ours",)]
    assert choose_keys(jobs, ["Ti*"]) == []


def test_the_report_tells_the_newest_figure_and_why_one_failed(tmp_path):
    lines = Lines(tmp_path, "rates", HERE)
    packages = {"torch": "2.11.0", "deepspeed": "0.19.8"}
    machine = {"python": "3.12.3", "processor": "a processor", "cores": 16, "gpus": ["a GPU"]}
    lines.append("environment", {**machine, "packages": packages})
    lines.append("B/16 ours", {"images_per_s": 4000.0, "ms_range": [1.5, 2.0]})
    lines.append("B/16 ours", {"images_per_s": 4260.5, "ms_range": [1.0, 2.0]})
    lines.append("H/14 ours", {"failed": "died | of it"})
    report = write_report(tmp_path)
    assert "a GPU, 16 cores of a processor, Python 3.12.3, torch 2.11.0, deepspeed 0.19.8." in report
    assert "| B/16 ours | 4,260 | 1.0-2.0 |" in report
    assert "4,000" not in report
    assert "| H/14 ours | died \\| of it |" in report
    assert "Commit c0ffee" in report


def test_the_command_teaches(capsys, tmp_path):
    assert main([]) == 0
    listed = capsys.readouterr().out
    assert all(f"  {name}" in listed for name in PARTS)
    for words, text in (
        (["rate", "--out", "x"], 'no part "rate": parity, waits'),
        (["rates"], "--out FOLDER says where"),
        (["report"], "report takes one folder"),
        (["report", str(tmp_path)], "holds no results"),
        (["save", "--out", str(tmp_path), "--tiny", "--only", "XL"], "no such figure; there are tiny/4"),
    ):
        assert main(words) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"error: {text}") or text in error
        assert error.count("\n") == 1
    assert json.dumps(list(PARTS)) == json.dumps(
        ["parity", "waits", "rates", "engines", "feed", "save", "tests"]
    )


def test_the_clock_is_that_of_a_busy_gpu(tmp_path, monkeypatch):
    samples = ["0, 345, 78.5, 30", "97, 1980, 610.0, 55", "100, 1755, 690.0, 57", "[N/A], 345, 80.0, 31"]
    command = tmp_path / "nvidia-smi"
    command.write_text("#!/bin/sh\n" + "".join(f"echo '{line}'\n" for line in samples) + "exec sleep 60\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with Telemetry() as telemetry:
        deadline = time.monotonic() + 100
        while len(telemetry._samples) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.1)
        assert telemetry.since_last() == {"sm_mhz": 1867.5, "watts": 650.0, "celsius": 56.0}
        assert telemetry.since_last() == {}
