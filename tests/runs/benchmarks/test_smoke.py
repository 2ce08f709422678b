"""Each benchmark at its smallest size measures, and leaves the keys that the files under docs/results have."""

import json
import os
import sys
from dataclasses import replace
from importlib import import_module

import pytest
import torch
from helpers.commands import ROOT
from helpers.comparison import read_rows, write_config

from benchmarks import engine, loader, objectives, profile_step, scale, step
from benchmarks.gpu.__main__ import main as gpu
from benchmarks.gpu.parts import views
from benchmarks.gpu.parts.feed import make_images
from benchmarks.gpu.parts.sizes import TINY
from benchmarks.loading import bands
from benchmarks.loading.rows import ROWS

RESULTS = ROOT / "docs" / "results"
SMALL = ["--rounds", "2", "--batch", "4", "--threads", "1", *TINY.overrides]
# Older files lack the first, and have the second, which had no user.
CHANGED = {"auto_precision", "peak_tflops"}


@pytest.fixture
def measure(tmp_path, monkeypatch):
    """Runs a benchmark's main with words; returns its report, whose keys are those of the published file."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", os.environ.get("CUDA_VISIBLE_DEVICES", ""))
    threads = torch.get_num_threads()

    def run(module, name: str, *words: str) -> dict:
        out = tmp_path / name
        monkeypatch.setattr(sys, "argv", [module.__file__, *words, "--out", str(out)])
        module.main()
        report = json.loads(out.read_text())
        assert report.keys() - CHANGED == json.loads((RESULTS / name).read_text()).keys() - CHANGED
        return report

    yield run
    torch.set_num_threads(threads)


def test_step(measure):
    words = ["--contenders", "ours", "transformers eager", "--steps", "1"]
    fp32 = measure(step, "step.json", *SMALL, *words)["results"]["fp32"]
    assert fp32["speedup"]["transformers"]["eager"]["peer"] == "transformers eager"


@pytest.mark.slow
def test_objectives(measure):
    results = measure(objectives, "objectives.json", *SMALL, "--steps", "1", "objective.mask_ratio=0.75")
    assert {"mae", "contrastive_mae", "pixio", "masked_patch"} <= results["results"].keys()


def test_engine(measure, monkeypatch):
    monkeypatch.setattr(engine, "ENGINES", {"torch": engine.ENGINES["torch"]})
    words = ["monitor.log_every_steps=2", "monitor.tensorboard=false"]
    assert len(measure(engine, "engine.json", *SMALL, *words)["results"]["torch"]["turns_ms"]) == 2


def test_profile_step(measure):
    words = ["--config", str(TINY.config), "--batch", "4", "--steps", "1", *TINY.overrides]
    profile = measure(profile_step, "profile_step.json", *words)["results"]["mae_cifar_tiny"]
    assert 0 < profile["time_in_products"] < 1


@pytest.mark.parametrize(
    "part", ["saving", *(pytest.param(part, marks=pytest.mark.slow) for part in ("start", "compile"))]
)
def test_scale(measure, monkeypatch, part):
    for name, value in {"STATES": ("mae_cifar_tiny",), "SHARDS": (40,), "_HASHED_BYTES": 1 << 16}.items():
        monkeypatch.setattr(scale, name, value)
    result = measure(scale, "scale.json", "--parts", part, "--rounds", "1")["results"][part]
    assert result.keys() == json.loads((RESULTS / "scale.json").read_text())["results"][part].keys()


@pytest.mark.slow
def test_loader(measure, monkeypatch, tmp_path):
    make_images(tmp_path / "images", 130, 32, 32)
    monkeypatch.setitem(ROWS, "small_rrc", replace(ROWS["small_rrc"], batches=1))
    words = ["--small", str(tmp_path / "images"), "--rows", "small_rrc", "--rounds", "1"]
    result = measure(loader, "loader.json", *words)["results"]["small_rrc"]
    published = json.loads((RESULTS / "loader.json").read_text())["results"]["small_rrc"]
    assert result["images_per_s"].keys() == published["images_per_s"].keys()


def test_bands(measure, monkeypatch):
    for name, value in {"SIZES": (16,), "TILES": 40}.items():
        monkeypatch.setattr(bands, name, value)
    results = measure(bands, "bands_loader.json", "--rounds", "1", "--steps", "1")["results"]
    assert results["16 px"]["times_of_peer"]["ours / tifffile"]["median"] > 0


FIGURES = {
    "rates": ["machine", "tiny/4 ours", "tiny/4 transformers sdpa"],
    "feed": ["images made", "decode, 1 workers", "tiny/4 from JPEGs"],
}


def takers(part, scratch) -> dict:
    waves = import_module(f"benchmarks.gpu.parts.{part}").waves(tiny=True, scratch=scratch)
    return {key: take for wave in waves for group in wave for key, take in group.items()}


def values_of(figure) -> dict:
    """What a figure that makes itself ready first, or does not, measures."""
    return figure if isinstance(figure, dict) else list(figure)[-1]


@pytest.mark.parametrize("part", FIGURES)
def test_gpu_parts(part, tmp_path):
    figures = takers(part, tmp_path)
    measured = {key: values_of(figures[key]()) for key in FIGURES[part]}
    assert all(values.get("met", True) for values in measured.values())
    known = {name for line in (RESULTS / f"gpu/{part}.jsonl").open() for name in json.loads(line)}
    assert {name for values in measured.values() for name in values} <= known


def test_gpu_views(tmp_path):
    """Both places are measured, and give the same bits."""
    figures = takers("views", tmp_path)
    equal = {way: figures[f"{way}: equal"]()["met"] for way in views.WAYS}
    assert all(equal.values()), equal
    way = "random_resized and color"
    device, host = (figures[f"{way}, {place}, 8"]() for place in views.PLACES)
    assert device.keys() == host.keys()
    assert device["images_per_s"] > 0


def test_gpu_command(tmp_path):
    words = ["feed", "--out", str(tmp_path), "--tiny", "--commit", "c0ffee"]
    assert gpu([*words, "--only", "images made"]) == 0
    lines = [json.loads(line) for line in (tmp_path / "feed.jsonl").read_text().splitlines()]
    assert [line["key"] for line in lines] == ["environment", "images made"]
    assert all((line["part"], line["tiny"], line["commit"]) == ("feed", True, "c0ffee") for line in lines)
    assert [gpu([*words, "--limit", "0"]), gpu([*words, "--only", "XL"])] == [75, 2]


@pytest.mark.slow
def test_a_quarter_hour(digits, tmp_path, capsys):
    """Call by call; steps of equal compute that were foretold are those that finished runs tell, or it fails."""
    assert gpu(["quarter-hour", "none", "--limit", "0"]) == 2
    words = ["quarter-hour", str(write_config(tmp_path, digits, steps=2)), f"run.dir={tmp_path / 'out'}"]
    assert gpu([*words, "--limit", "0"]) == 75
    assert gpu([*words, "--limit", "600"]) == 0
    assert "begins as long as MAE" in capsys.readouterr().out
    assert {line["entry"] for line in read_rows(tmp_path / "out")} >= {"ViT from MAE", "as long as MAE"}
