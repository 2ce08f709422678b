"""Each part of `python -m benchmarks.gpu` at its tiny size: what a GPU is to run, runs.

In this process, which has all imports already; the command itself is run once.
"""

import json
import math
import subprocess
import sys
from importlib import import_module

import pytest
import torch
from helpers.commands import ROOT

from benchmarks.gpu.__main__ import PARTS, choose_keys
from benchmarks.gpu.report import write_report
from mae_vit.objectives import OBJECTIVES


@pytest.fixture(autouse=True)
def threads_as_before():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def measured(tmp_path):
    """Measures a part's figures of some names: measured("rates", "machine") -> {key: values}."""

    def measure(part: str, *patterns: str) -> dict[str, dict]:
        figures = {}
        jobs = import_module(f"benchmarks.gpu.parts.{part}").jobs(tiny=True, scratch=tmp_path)
        for job in choose_keys(jobs, patterns):
            job.measure(frozenset(job.keys), figures.__setitem__)
            assert set(job.keys) <= set(figures)
        json.dumps(figures)
        return figures

    return measure


def test_every_part_is_listed_and_names_each_figure_once(tmp_path):
    for name in PARTS.keys() - {"tests"}:
        for tiny in (True, False):
            jobs = import_module(f"benchmarks.gpu.parts.{name}").jobs(tiny=tiny, scratch=tmp_path)
            keys = [key for job in jobs for key in job.keys]
            assert len(keys) == len(set(keys)) > 0


def test_parity(measured):
    figures = measured("parity", "masks", "* fp32", "* bf16", "checkpoint*")
    assert len(figures) == 3 + 2 * len(OBJECTIVES)
    assert all(figure["met"] for figure in figures.values())
    # In lower precision losses are not the same: both were taken.
    assert all(0 < figures[f"{name} bf16"]["largest_difference"] < 0.02 for name in OBJECTIVES)


@pytest.mark.slow
@pytest.mark.parametrize("part", ["parity", "rates"])
def test_compiled(measured, part):
    figures = measured(part, "mae compiled", "tiny/4 ours compiled", "tiny/4 transformers sdpa compiled")
    assert all(figure.get("met", True) for figure in figures.values())
    assert all(figure["compile_s"] > 1 for figure in figures.values() if "compile_s" in figure)


def test_waits(measured):
    figures = measured("waits", "torch *", "ZeRO 0", "ZeRO 2")
    assert len(figures) == len(OBJECTIVES) + 2
    assert all(figure["steps"] == 5 for figure in figures.values())
    assert {figure["synchronized_per_step"] for figure in figures.values()} == {0.0}


def test_rates(measured):
    figures = measured("rates", "machine", "tiny/4 ours", "tiny/4 transformers sdpa")
    assert figures["machine"]["matrix_tflop_s"] > 0
    for name in ("ours", "transformers sdpa"):
        figure = figures[f"tiny/4 {name}"]
        assert figure["batch_size"] == 8
        assert figure["images_per_s"] == pytest.approx(8e3 / figure["ms_per_step"], rel=0.01)


def test_engines(measured, monkeypatch):
    engines = import_module("benchmarks.gpu.parts.engines")
    # Each is a process that imports everything: all three take turns in the slow test.
    monkeypatch.setattr(engines, "ENGINES", {"torch": engines.ENGINES["torch"]})
    figures = measured("engines", "tiny/4 x 4 eager*")
    assert list(figures) == ["tiny/4 x 4 eager torch"]
    assert figures["tiny/4 x 4 eager torch"]["images_per_s"] > 0


@pytest.mark.slow
def test_engines_in_turns(measured):
    figures = measured("engines", "tiny/4 x 8 eager*")
    assert [key.split()[-1] for key in figures] == ["torch", "ZeRO-0", "ZeRO-1"]
    assert figures["tiny/4 x 8 eager torch"]["time_over_torch"] == 1


def test_feed(measured):
    figures = measured("feed", "images made", "decode*", "tiny/4 from JPEGs", "*memory, pad")
    assert figures["images made"]["images"] == 40
    assert figures["decode, 1 workers"]["per_worker"] > 0
    for key in ("tiny/4 from JPEGs", "tiny/4 from memory, pad"):
        assert figures[key]["images_per_s"] > 0
        assert 0 <= figures[key]["data_wait_frac"] < 1


def test_save(measured):
    figure = measured("save", "*")["tiny/4"]
    assert 0 < figure["gather_s"] < 10
    assert figure["write_s"] > 0
    assert all(math.isfinite(value) for value in figure.values())


@pytest.mark.slow
def test_the_command_runs_the_tests_of_gpus(tmp_path):
    words = ["tests", "--tiny", "--out", str(tmp_path), "--only", "*test_cuda_agrees", "--commit", "c0ffee"]
    command = [sys.executable, "-m", "benchmarks.gpu", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    described, line = [json.loads(line) for line in (tmp_path / "tests.jsonl").read_text().splitlines()]
    assert described["key"] == "environment"
    assert described["commit"] == line["commit"] == "c0ffee"
    assert line["key"] == "tests/unit/core/test_keyed_rng.py::test_cuda_agrees"
    assert line["outcome"] == ("passed" if torch.cuda.is_available() else "skipped")
    assert f"| {line['key']} | {line['outcome']} | yes |" in write_report(tmp_path)


def test_objectives_are_compared_on_one_encoder():
    """Contrast and Pixio's options stand beside MAE, as their presets have them."""
    from benchmarks.harness.workloads import ROOT, TINY, load
    from benchmarks.objectives import WHOLE, variants

    of = {"batch_size": 8, "precision": "fp32", "threads": 1}
    compared = variants(load(TINY, [], **of))
    assert {WHOLE, "contrastive_mae", "pixio"} <= compared.keys()
    preset = load(ROOT / "configs" / "pixio_cifar_tiny.yaml", [], **of).config
    pixio = compared["pixio"].config
    assert pixio.objective == preset.objective
    assert pixio.model == preset.model
    assert compared["contrastive_mae"].config.objective.name == "contrastive_mae"
    # A deeper decoder and three more tokens.
    assert compared["pixio"].flops_per_image > compared[WHOLE].flops_per_image
