"""Runs side by side: what waits for what, and who does it."""

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from helpers.commands import ROOT, wait_until
from helpers.comparison import spec

from mae_vit.comparison import main
from mae_vit.comparison.config import CompareConfig
from mae_vit.comparison.foresee import Times, estimate_times
from mae_vit.comparison.runner import PRELOADED, Bar, Runner, count_slots, own_gpus
from mae_vit.comparison.spec import RunSpec
from mae_vit.config.load import load_config
from mae_vit.config.presets import find_config
from mae_vit.training.engines.precision import Chosen

# Notes when it begins and ends; ends as its config says.
_SCRIPT = """
import json, os, pathlib, sys, time
folder, name = (word.partition("=")[2] for word in sys.argv[-2:])
log = pathlib.Path(__file__).with_name("order")
def note(what):
    with log.open("a") as file:
        file.write(f"{what} {name}\\n")
note("begin")
time.sleep(2.0 if name == "pretrain" else 0.0)
note("end")
code = int(pathlib.Path(sys.argv[2]).read_text()) if name == "pretrain" else 0
if not code:
    summary = {"status": "done", "run_id": os.environ["MAE_VIT_RUN_ID"]}
    (pathlib.Path(folder) / "summary.json").write_text(json.dumps(summary))
sys.exit(code)
"""


def make_runs(folder: Path, code: int) -> list[RunSpec]:
    script = folder / "script.py"
    script.write_text(_SCRIPT)
    (folder / "config.yaml").write_text(str(code))
    pretrain = spec("pretrain", folder, script)
    return [pretrain, spec("tuned", folder, script, pretraining=pretrain), spec("scratch", folder, script)]


def run_all(runs: list[RunSpec], slots: int, **options) -> Runner:
    runner, bar = Runner(slots, **options), Bar(runs)
    runner.run(runs, bar)
    bar.close()
    return runner


def script_in(folder: Path, text: str) -> Path:
    (folder / "config.yaml").touch()
    (folder / "script.py").write_text(text)
    return folder / "script.py"


def test_auto_is_one_precision_for_all_runs_on_any_machine(tmp_path, monkeypatch):
    config = load_config(CompareConfig, find_config("compare_demo"), ["set.train.precision=auto"])
    monkeypatch.setattr(main, "choose_precision", lambda *_: Chosen("bf16", "auto: of the first machine"))
    assert main.shared_precision(config, None).precision == "bf16"
    monkeypatch.setattr(main, "choose_precision", lambda *_: Chosen("fp32", "auto: of another"))
    assert main.shared_precision(config, "bf16").precision == "bf16"
    # Pretraining, which does not take what is set for fine-tuning, resumes as it began.
    config.set["train.precision"] = "fp16"
    chosen = main.shared_precision(config, "bf16")
    assert chosen.precision == "bf16"
    assert "fp16" in chosen.why
    # The runs are told.
    script = script_in(tmp_path, "import os; print(os.environ['MAE_VIT_AUTO_PRECISION'])")
    say = spec("say", tmp_path, script)
    run_all([say], 1, precision="bf16")
    assert say.log.read_text().splitlines()[0] == "bf16"


@pytest.mark.parametrize("code", [0, 1])
def test_a_run_waits_for_what_it_needs_and_for_nothing_else(tmp_path, code):
    runner = run_all(make_runs(tmp_path, code), slots=2)
    order = (tmp_path / "order").read_text().splitlines()
    assert order.index("end scratch") < order.index("end pretrain")
    if code == 0:
        assert order.index("begin tuned") > order.index("end pretrain")
        assert not runner.failed
    else:
        assert "begin tuned" not in order
        assert "pretrain" in runner.failed["tuned"]


@pytest.mark.parametrize(("slots", "expected"), [(1, (16.0, 26.0)), (2, (13.0, 23.0)), (3, (13.0, 23.0))])
def test_the_time_of_all_runs_is_that_of_what_waits_for_what(tmp_path, slots, expected):
    pretrain = spec("pretrain", tmp_path)
    tuned = spec("tuned", tmp_path, pretraining=pretrain)
    last = spec("last", tmp_path, pretraining=tuned)
    seconds = {
        pretrain: (10.0, 20.0),
        tuned: (2.0, 2.0),
        spec("scratch", tmp_path): (3.0, 3.0),
        last: (1.0, 1.0),
    }
    assert Times(seconds).until_all_end(slots) == expected


def test_a_run_takes_as_long_as_those_of_its_mode_and_labels(tmp_path):
    row = [
        spec(f"row/{number}", tmp_path, overrides={"finetune.mode": mode, "data.labels_per_class": labels})
        for number, (mode, labels) in enumerate([("knn", 5), ("knn", 5), ("knn", 9), ("finetune", 5)])
    ]
    row[0].folder.mkdir(parents=True)
    report_summary(row[0], run_id=row[0].id, status="done", wall_s=3.0)
    plan = SimpleNamespace(runs=row, pretraining={}, cells=[])
    assert estimate_times(plan, "fp32", slots=1).seconds == {row[1]: (3.0, 3.0)}


def test_a_log_has_a_line_when_a_run_begins_and_one_when_it_ends(tmp_path, capsys):
    run_all(make_runs(tmp_path, 0), slots=1)
    lines = [
        line for line in re.split(r"[\r\n]+", capsys.readouterr().err) if line.startswith(("begins", "ends"))
    ]
    assert [line.replace(":", "").split()[:2] for line in lines] == [
        [what, name] for name in ("pretrain", "tuned", "scratch") for what in ("begins", "ends")
    ]


@pytest.mark.parametrize(
    ("summary", "expected"),
    [
        ({"test_top1": 0.5, "val_top1": 0.4, "loss": 1.0}, "50.0% of test images right"),
        ({"val_miou": 0.25, "loss": 1.0}, "25.0% mIoU on validation images"),
        ({"val_top1": None, "loss": 0.12345}, "loss 0.1235"),
        ({}, "done"),
    ],
)
def test_a_finished_run_tells_its_result(tmp_path, summary, expected):
    run = spec("a", tmp_path)
    report_summary(run, **summary)
    assert run.describe_result() == expected


@pytest.mark.parametrize("name", PRELOADED)
def test_what_the_server_is_to_import_is_there(name):
    """It passes over what it cannot import, and the runs would do it each by itself."""
    assert importlib.util.find_spec(name)


def test_several_processes_share_the_runs(tmp_path):
    # A lock belongs to the open file: threads meet it as processes do. But they share the environment of jobs.
    with mock.patch.dict(os.environ), ThreadPoolExecutor(2) as pool:
        runners = list(pool.map(lambda _: run_all(make_runs(tmp_path, 0), slots=1), range(2)))
    begun = [line for line in (tmp_path / "order").read_text().splitlines() if line.startswith("begin")]
    assert sorted(begun) == ["begin pretrain", "begin scratch", "begin tuned"]
    assert not any(runner.failed for runner in runners)
    assert all(run.is_done() for run in make_runs(tmp_path, 0))


@pytest.mark.parametrize(
    ("visible", "counted", "expected"),
    [
        ("", 2, ["0", "1"]),
        ("GPU-a1, GPU-b2", 2, ["GPU-a1", "GPU-b2"]),
        # CUDA reads up to the first that is none.
        ("4,-1,6", 1, ["4"]),
        # Of slices it counts one, however many there are.
        ("MIG-a1,MIG-b2, MIG-c3", 1, ["MIG-a1", "MIG-b2", "MIG-c3"]),
        ("MIG-a1,MIG-b2", 0, []),
        (None, 0, []),
    ],
)
def test_each_run_has_a_gpu_or_a_slice_of_one(monkeypatch, visible, counted, expected):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: counted)
    assert own_gpus() == expected
    if expected:
        assert count_slots("auto") == len(expected)
    assert count_slots(5) == 5


def test_runs_side_by_side_see_one_slice_each(monkeypatch, tmp_path):
    text = "import os, time; time.sleep(0.5); print(os.environ['CUDA_VISIBLE_DEVICES'])"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-a1,MIG-b2")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    script = script_in(tmp_path, text)
    runs = [spec(name, tmp_path, script) for name in "xy"]
    run_all(runs, slots=count_slots("auto"))
    assert [run.log.read_text().splitlines()[0] for run in runs] == ["MIG-a1", "MIG-b2"]


def test_a_run_that_ends_without_its_results_has_failed(tmp_path):
    runner = run_all([spec("it", tmp_path, script_in(tmp_path, "print('nothing')"))], 1)
    assert runner.failed["it"].startswith("exit 0: ")


@pytest.mark.parametrize(("code", "failed"), [(130, False), (75, False), (1, True)])
def test_a_run_that_ctrl_c_ends_beside_its_comparison_has_not_failed(tmp_path, code, failed):
    ready = tmp_path / "ready"
    script = script_in(
        tmp_path,
        f"""
import pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit({code}))
pathlib.Path({str(ready)!r}).touch()
time.sleep(500)
""",
    )
    run, runner = spec("long", tmp_path, script), Runner(1)

    def stop():
        wait_until(ready.exists)
        runner.stop("SIGINT")

    bar = Bar([run])
    Thread(target=stop).start()
    runner.run([run], bar)
    bar.close()
    assert bool(runner.failed) == failed


_GROUP = """
import pathlib, sys
from mae_vit.comparison.main import _stopping
from mae_vit.comparison.runner import Bar
from mae_vit.comparison.runner import Runner
from mae_vit.comparison.spec import RunSpec
folder, runner = pathlib.Path(sys.argv[1]), Runner(1)
run = RunSpec("long", (str(folder / "script.py"),), folder / "config.yaml", {}, folder / "long", "long")
with _stopping(runner):
    runner.run([run], Bar([run]))
print(runner.stopped, runner.failed)
"""


def test_a_signal_to_all_processes_lets_the_run_save(tmp_path):
    """As a scheduler sends it: the server that has forked the run must not end before the run has."""
    script_in(
        tmp_path,
        """
import pathlib, signal, sys, time
folder = pathlib.Path(__file__).parent
def save(*_):
    time.sleep(3)
    (folder / "saved").touch()
    sys.exit(75)
signal.signal(signal.SIGTERM, save)
(folder / "ready").touch()
time.sleep(500)
""",
    )
    words = [sys.executable, "-c", _GROUP, str(tmp_path)]
    process = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True)
    wait_until(lambda: (tmp_path / "ready").exists() or process.poll() is not None)
    os.killpg(process.pid, signal.SIGTERM)
    assert process.communicate(timeout=500)[0] == "SIGTERM {}\n"
    assert (tmp_path / "saved").exists()


ENDED = {"status": "done", "total_steps": 10, "flops_per_step": 1e9}
LONG = {"status": "done", "total_steps": 100, "flops_per_step": 30}


def report_summary(run, **summary) -> None:
    run.folder.mkdir(exist_ok=True)
    (run.folder / "summary.json").write_text(json.dumps(summary))


@pytest.mark.parametrize(
    ("first", "later", "foreseen", "shares"),
    [
        # Runs that are done in one go.
        ((ENDED, {}), (ENDED, ENDED), None, (0.5, 1.0)),
        # A long run is done, neighbours are still searched: they take a third of its FLOPs.
        ((LONG, {"scoring_flops": 1000}), (LONG, {**ENDED, "total_steps": 1e-6}), None, (0.75, 1.0)),
        # A run that has not begun counts as foreseen.
        ((LONG, {"status": "done", "scoring_flops": 500}, {}), (), 1000, (3500 / 4500,)),
    ],
)
def test_a_bar_counts_flops(tmp_path, first, later, foreseen, shares):
    runs = [spec("abc"[n], tmp_path, flops=foreseen) for n in range(len(first))]
    bar = Bar(runs)
    bar.show(runs)
    for summaries, share in zip((first, later), shares, strict=False):
        for run, summary in zip(runs, summaries, strict=True):
            if summary:
                report_summary(run, **summary)
        bar.show(runs)
        assert bar._bar.n == pytest.approx(share)
    bar.close()


def test_what_was_done_before_is_no_part_of_the_time_left(tmp_path):
    runs = [spec(name, tmp_path) for name in "abcdef"]
    for run in (runs[0], runs[1], runs[4]):
        report_summary(run, **ENDED)
    bar = Bar(runs)
    bar.show(runs[2:4])
    for name in ("start_t", "last_print_t"):
        setattr(bar._bar, name, getattr(bar._bar, name) - 100)
    assert "01:40<?" in str(bar._bar)
    report_summary(runs[2], **ENDED)
    bar.show(runs[3:4])
    assert "01:40<03:20" in str(bar._bar)  # a sixth of it all in 100 s, two left
