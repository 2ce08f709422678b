"""Reports of benchmarks: what they were measured on stays with them, and names no machine."""

import json
import subprocess
import sys

import pytest
from helpers.commands import ROOT

from benchmarks.harness import machine, reports
from benchmarks.scale import measure_start
from benchmarks.scaling.synthetic_shards import write_many_shards

CPU_INFO = """processor\t: 0
vendor_id\t: GenuineIntel
cpu family\t: 6
model\t\t: 143
model name\t: a processor @ 2.0GHz
stepping\t: 8
flags\t\t: fpu avx2 avx512f avx512_bf16 amx_bf16 amx_tile

processor\t: 1
model name\t: another
"""


def test_a_processor_is_described_by_model_and_the_flags_that_matter():
    described = machine.describe_processor(CPU_INFO)
    assert described["name"] == "a processor @ 2.0GHz"
    assert (described["family"], described["model"], described["stepping"]) == ("6", "143", "8")
    assert described["flags"] == ["avx2", "avx512f", "avx512_bf16", "amx_tile", "amx_bf16"]
    assert machine.describe_processor("")["flags"] == []


def test_an_environment_has_threads_and_load_but_no_path_and_no_kernel(monkeypatch):
    data = f"--data={ROOT}/elsewhere/cifar10"
    monkeypatch.setattr(sys, "argv", [str(ROOT / "benchmarks/scale.py"), data, "--out", f"{ROOT}/x.json"])
    environment = reports.measured_on(threads=3)
    assert environment["command"] == ["benchmarks/scale.py", "--data=cifar10", "--out", "x.json"]
    assert environment["torch_threads"] == 3
    assert environment["load_1min_at_start"] == machine.LOAD_AT_START
    assert environment["dirty"] in (True, False, None)
    assert "+changes" not in (environment["git_commit"] or "")
    text = json.dumps(environment)
    assert str(ROOT) not in text
    assert not {"platform", "slurm_job", "hostname"} & environment.keys()


def test_changed_sources_are_dirty_and_results_are_not(tmp_path):
    def git(*words):
        identity = ("-c", "user.name=a", "-c", "user.email=a@b")
        subprocess.run(["git", "-C", str(tmp_path), *identity, *words], check=True, capture_output=True)

    assert reports.is_dirty(tmp_path) is None
    (tmp_path / "mae_vit").mkdir()
    (tmp_path / "mae_vit" / "a.py").write_text("a = 1\n")
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "a")
    (tmp_path / "results.json").write_text("{}")
    assert reports.is_dirty(tmp_path) is False
    (tmp_path / "mae_vit" / "new.py").write_text("b = 1\n")
    assert reports.is_dirty(tmp_path) is True


def test_a_part_that_is_measured_anew_leaves_others_as_they_are(tmp_path):
    out = tmp_path / "scale.json"
    reports.write_part(out, "scale", "ranks", {"rate": 1, "environment": {"git_commit": "old"}})
    reports.write_part(out, "scale", "start", {"total": 2, "environment": {"git_commit": "new"}})
    results = json.loads(out.read_text())["results"]
    assert results["ranks"] == {"rate": 1, "environment": {"git_commit": "old"}}
    assert results["start"]["environment"] == {"git_commit": "new"}
    with pytest.raises(AssertionError):
        reports.write_part(out, "scale", "start", {"total": 2})
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.slow
def test_a_start_is_measured_to_its_first_step(tmp_path):
    samples = write_many_shards(tmp_path / "shards", shards=40, shard_samples=500)
    measured = measure_start(tmp_path / "shards")
    assert samples == 20_000
    assert measured["total_s"] > 0
    assert set(measured["look_up"]) == {"global", "blocks"}
