"""Runs side by side: what waits for what, and who does it."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Thread

import pytest
import torch
from helpers.commands import ROOT

from mae_vit.config.load import load_config
from mae_vit.finetuning.comparison import main
from mae_vit.finetuning.comparison.config import CompareConfig
from mae_vit.finetuning.comparison.jobs import Job
from mae_vit.finetuning.comparison.matrix.matrix import Matrix
from mae_vit.finetuning.comparison.progress_bar import Bar
from mae_vit.finetuning.comparison.protocol import keep_protocol
from mae_vit.finetuning.comparison.runner import PRELOADED, Runner, own_gpus, slots_of
from mae_vit.training.engines.precision import Chosen

# Notes when it begins and ends; ends as its config says.
_SCRIPT = """
import pathlib, sys, time
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
    pathlib.Path(folder).mkdir()
    (pathlib.Path(folder) / "summary.json").write_text('{"status": "done"}')
sys.exit(code)
"""


def make_jobs(folder: Path, code: int) -> list[Job]:
    script, config = folder / "script.py", folder / "config.yaml"
    script.write_text(_SCRIPT)
    config.write_text(str(code))
    starts = {"pretrain": None, "tuned": str(folder / "pretrain"), "scratch": None}
    return [
        Job(name, folder / name, (str(script),), config, (), str(folder), start)
        for name, start in starts.items()
    ]


def run_all(jobs: list[Job], slots: int) -> Runner:
    runner, bar = Runner(slots), Bar(jobs)
    runner.run(jobs, bar)
    bar.close()
    return runner


def test_auto_is_one_precision_for_all_runs_on_any_machine(tmp_path, monkeypatch):
    config = load_config(CompareConfig, ROOT / "configs" / "compare_demo.yaml", ["set.train.precision=auto"])
    monkeypatch.setattr(main, "choose_precision", lambda *_: Chosen("bf16", "auto: of the first machine"))
    assert main.choose_precision_of(config, tmp_path).precision == "bf16"
    keep_protocol(tmp_path, config, precision="bf16", tested=0)
    monkeypatch.setattr(main, "choose_precision", lambda *_: Chosen("fp32", "auto: of another"))
    assert main.choose_precision_of(config, tmp_path)[:2] == ("bf16", "auto: the comparison began so")
    # Pretraining, which does not take what is set for fine-tuning, goes on as it began.
    config.set["train.precision"] = "fp16"
    chosen = main.choose_precision_of(config, tmp_path)
    assert chosen[:2] == ("bf16", "auto: the comparison began so; fine-tuning is in fp16, as set")
    # The runs are told.
    (tmp_path / "say.py").write_text("import os; print(os.environ['MAE_VIT_AUTO_PRECISION'])")
    job = Job("say", tmp_path / "say", (str(tmp_path / "say.py"),), tmp_path / "say.py", (), str(tmp_path))
    bar = Bar([job])
    Runner(1, "bf16").run([job], bar)
    bar.close()
    assert job.log.read_text() == "bf16\n"


@pytest.mark.parametrize("code", [0, 1])
def test_a_run_waits_for_its_start_and_for_nothing_else(tmp_path, code):
    runner = run_all(make_jobs(tmp_path, code), slots=2)
    order = (tmp_path / "order").read_text().splitlines()
    assert order.index("end scratch") < order.index("end pretrain")
    if code == 0:
        assert order.index("begin tuned") > order.index("end pretrain")
        assert not runner.failed
    else:
        assert "begin tuned" not in order
        assert runner.failed["tuned"] == f"its start {tmp_path / 'pretrain'} was not made"


def test_cells_begin_beside_the_pretraining_unless_they_wait_for_tuning(tmp_path, monkeypatch):
    """Else the second of two cores waits until the longest pretraining is over."""
    rounds = []
    monkeypatch.setattr(Runner, "run", lambda self, jobs, bar: rounds.append([job.name for job in jobs]))
    config = load_config(CompareConfig, ROOT / "configs" / "compare_demo.yaml", [])
    tuned = config.entries[0].model_copy(
        update={"name": "tuned", "tune": [{"optim.lr": 1e-3}, {"optim.lr": 2e-3}]}
    )
    matrix = Matrix(
        config.model_copy(update={"entries": [*config.entries, tuned]}), ROOT / "configs", tmp_path
    )
    main._run_all(matrix, "fp32")
    first, *later = rounds
    assert first[:3] == [f"pretrain {name}" for name in config.pretrain]
    assert [name for name in first[3:] if not name.startswith("tune ")] == [
        cell.job.name for cell in matrix.cells(compute_of=False) if cell.entry is not tuned
    ]
    assert later == [[], []]


@pytest.mark.parametrize("name", PRELOADED)
def test_what_the_server_is_to_import_is_there(name):
    """It passes over what it cannot import, and the runs would do it each by itself."""
    assert importlib.util.find_spec(name)


def test_several_processes_share_the_runs(tmp_path):
    # A lock belongs to the open file: threads meet it as processes do.
    with ThreadPoolExecutor(2) as pool:
        runners = list(pool.map(lambda _: run_all(make_jobs(tmp_path, 0), slots=1), range(2)))
    begun = [line for line in (tmp_path / "order").read_text().splitlines() if line.startswith("begin")]
    assert sorted(begun) == ["begin pretrain", "begin scratch", "begin tuned"]
    assert not any(runner.failed for runner in runners)
    assert all(job.is_done() for job in make_jobs(tmp_path, 0))


def test_the_eta_is_that_of_the_longest_run_once_few_are_left(tmp_path, monkeypatch, capsys):
    """Two slots: a short run has ended, a long one is at a tenth after 100 seconds."""
    now = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    monkeypatch.setattr("tqdm.std.time", lambda: now)
    short, long = (Job(name, tmp_path / name, (), tmp_path, (), "") for name in ("short", "long"))

    def reach(job, status, step, total):
        job.folder.mkdir(exist_ok=True)
        summary = {"status": status, "total_steps": total, "flops_per_step": 10}
        (job.folder / "summary.json").write_text(json.dumps(summary))
        (job.folder / "metrics.jsonl").write_text(f'{{"step": {step}}}\n')

    for job, total in ((short, 100), (long, 1000)):
        reach(job, "running", 0, total)
    bar = Bar([short, long])
    bar.show([short, long])
    now = 100.0
    reach(short, "done", 100, 100)
    reach(long, "running", 100, 1000)
    bar.show([long])
    bar.close()
    # By the mean rate of both it would be 450 s.
    assert "01:40<15:00" in capsys.readouterr().err.splitlines()[-1]


def test_scoring_is_work_as_far_as_it_is_measured(tmp_path):
    """A long run is done, neighbors are still searched: they took a third of its FLOPs."""
    knn = ('finetune.mode="knn"',)
    trained, scored = (
        Job(name, tmp_path / name, (), tmp_path, words, "") for name, words in (("a", ()), ("b", knn))
    )

    def report(job, **summary):
        job.folder.mkdir(exist_ok=True)
        (job.folder / "summary.json").write_text(json.dumps(summary))

    report(trained, status="done", total_steps=100, flops_per_step=30)
    report(scored, status="running", scoring_flops=1000)
    bar = Bar([trained, scored])
    bar.show([scored])
    assert bar._bar.n == pytest.approx(0.75)
    report(scored, status="done", scoring_flops=1000)
    bar.show([])
    assert bar._bar.n == pytest.approx(1)
    bar.close()


def test_scoring_that_has_not_begun_counts_as_the_least_known(tmp_path):
    knn = ('finetune.mode="knn"',)
    jobs = [Job(n, tmp_path / n, (), tmp_path, words, "") for n, words in (("a", ()), ("b", knn), ("c", knn))]
    for job, flops in zip(jobs, (3000, 500), strict=False):
        job.folder.mkdir()
        summary = {"status": "done", "scoring_flops": flops}
        (job.folder / "summary.json").write_text(json.dumps(summary))
    bar = Bar(jobs)
    bar.show([])
    assert bar._bar.n == pytest.approx(3500 / 4000)
    bar.close()


@pytest.mark.parametrize(
    ("visible", "counted", "expected"),
    [
        (None, 2, ["0", "1"]),
        ("", 2, ["0", "1"]),
        ("4,6", 2, ["4", "6"]),
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
        assert slots_of("auto") == len(expected)
    assert slots_of(5) == 5


def test_runs_side_by_side_see_one_slice_each(monkeypatch, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import os, pathlib, sys, time\n"
        "folder = pathlib.Path(sys.argv[-2].partition('=')[2])\n"
        "time.sleep(0.5)\n"
        "folder.mkdir()\n"
        "(folder / 'saw').write_text(os.environ['CUDA_VISIBLE_DEVICES'])\n"
        "(folder / 'summary.json').write_text('{\"status\": \"done\"}')\n"
    )
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-a1,MIG-b2")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    config = tmp_path / "config.yaml"
    config.write_text("")
    jobs = [Job(name, tmp_path / name, (str(script),), config, (), str(tmp_path), None) for name in "xy"]
    assert run_all(jobs, slots=slots_of("auto")).failed == {}
    assert [(job.folder / "saw").read_text() for job in jobs] == ["MIG-a1", "MIG-b2"]


@pytest.mark.parametrize(("code", "failed"), [(130, False), (75, False), (1, True)])
def test_a_run_that_ctrl_c_ends_beside_its_comparison_has_not_failed(tmp_path, code, failed):
    script, ready = tmp_path / "script.py", tmp_path / "ready"
    script.write_text(
        f"""
import pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit({code}))
pathlib.Path({str(ready)!r}).touch()
time.sleep(500)
"""
    )
    config = tmp_path / "config.yaml"
    config.touch()
    job, runner = Job("long", tmp_path / "long", (str(script),), config, (), str(tmp_path)), Runner(1)

    def stop():
        while not ready.exists():
            time.sleep(0.05)
        runner.stop("SIGINT")

    bar = Bar([job])
    Thread(target=stop).start()
    runner.run([job], bar)
    bar.close()
    assert bool(runner.failed) == failed


_GROUP = """
import pathlib, sys
from mae_vit.finetuning.comparison.jobs import Job
from mae_vit.finetuning.comparison.main import _stopping
from mae_vit.finetuning.comparison.progress_bar import Bar
from mae_vit.finetuning.comparison.runner import Runner
folder = pathlib.Path(sys.argv[1])
script, config, runner = folder / "script.py", folder / "config.yaml", Runner(1)
job = Job("long", folder / "long", (str(script),), config, (), str(folder))
with _stopping(runner):
    runner.run([job], Bar([job]))
print(runner.stopped, runner.failed)
"""


def test_a_signal_to_all_processes_lets_the_run_save(tmp_path):
    """As a scheduler sends it: the server that has forked the run must not end before the run has."""
    (tmp_path / "config.yaml").touch()
    (tmp_path / "script.py").write_text(
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
"""
    )
    words = [sys.executable, "-c", _GROUP, str(tmp_path)]
    process = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True)
    while not (tmp_path / "ready").exists():
        assert process.poll() is None
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGTERM)
    assert process.communicate(timeout=500)[0] == "SIGTERM {}\n"
    assert (tmp_path / "saved").exists()
