"""Runs comparisons on one GPU, many runs at a time, each on cores of its own: small networks leave the GPU idle.

The runs are those of `mae-vit compare CONFIG key=value ...`, with the same folders and identities. Equal-compute runs
begin at once, with the steps that their setups foretell; at the end these are compared with what the runs recorded.
At the limit the runs save and end; the same command, or `mae-vit compare`, resumes.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from mae_vit.comparison.config import CompareConfig
from mae_vit.comparison.foresee import check_pretraining, foresee_runs
from mae_vit.comparison.main import check, check_data, shared_precision
from mae_vit.comparison.plan import ComparisonPlan
from mae_vit.comparison.protocol import keep_protocol, read_protocol
from mae_vit.comparison.report.page import write_report
from mae_vit.comparison.spec import RunSpec
from mae_vit.config.command_line import OneLineParser
from mae_vit.config.load import load_config
from mae_vit.config.presets import find_preset
from mae_vit.core.errors import EXIT_REQUEUE
from mae_vit.finetuning.config.modes import MODES
from mae_vit.training.engines.precision import AUTO_PRECISION
from mae_vit.training.outputs.run_folder import RUN_ID

# Sixteenths of the cores: a trainer and its data workers (`data.workers=auto`: one core less, at most four).
_PRETRAINING, _EQUAL_COMPUTE, _TRAINING, _SCORING = 5, 3, 2, 1
# Seconds that a run has to save after the limit.
_SAVING_S = 20.0


@dataclass
class _Running:
    spec: RunSpec
    process: subprocess.Popen[bytes]
    cores: list[int]
    begun: float


def make_plan(name: str, words: Sequence[str]) -> ComparisonPlan:
    """Returns the plan of `mae-vit compare NAME WORDS`."""
    source = find_preset(name) or Path(name)
    config = load_config(CompareConfig, source, list(words))
    folder = Path(config.run.dir or Path("runs") / config.run.name)
    return ComparisonPlan(config, source.resolve().parent, folder)


def rank_of(plan: ComparisonPlan, run: RunSpec) -> tuple[int, int]:
    """Returns a run's place in the order in which runs want cores, longest chains first, and its share of them."""
    if run in plan.pretraining.values():
        # Where there are many, more of them beside each other.
        return 0, _PRETRAINING if len(plan.pretraining) < 4 else _TRAINING
    if run.equal_compute:
        return 1, _EQUAL_COMPUTE
    trains = MODES[run.overrides["finetune.mode"]].augment
    return 2 if run.pretraining else 3, _TRAINING if trains else _SCORING


def run_all(plan: ComparisonPlan, precision: str, steps: dict[RunSpec, int], limit: float) -> bool:
    """Runs what is missing until `time.monotonic()` is `limit`; returns whether all runs are done."""
    missing = {run: rank_of(plan, run) for run in plan.runs if not run.is_done()}
    ranks = {replace(run, steps=steps[run]) if run in steps else run: rank for run, rank in missing.items()}
    waiting = sorted(ranks, key=lambda run: ranks[run][0])
    free, running, again = sorted(os.sched_getaffinity(0)), list[_Running](), set[RunSpec]()
    count, first = len(free), time.monotonic()
    while (waiting or running) and time.monotonic() < limit:
        ready = [run for run in waiting if all(need.is_done() for need in run.needs)]
        for number, run in enumerate(ready):
            wanted = max(1, ranks[run][1] * count // 16)
            if wanted <= len(free):
                if ranks[run][1] == _TRAINING:
                    # Where few runs are left, each has more data workers.
                    wanted = max(wanted, len(free) // (len(ready) - number))
                waiting.remove(run)
                own, free = free[:wanted], free[wanted:]
                words = ["train.compile=false"] if run in again else []
                process = _start(run, [*run.command(), *words], precision, own)
                running.append(_Running(run, process, own, time.monotonic()))
                _say(first, f"begins {run.name} on {len(own)} cores")
        if not running:
            break  # the others need one that failed
        for item in [item for item in running if item.process.poll() is not None]:
            running.remove(item)
            free += item.cores
            code, took = item.process.returncode, time.monotonic() - item.begun
            result = item.spec.describe_result() if code == 0 else f"exit {code}, {item.spec.log}"
            _say(first, f"ends   {item.spec.name} after {took:.0f} s: {result}")
            if code and item.spec not in again:
                again.add(item.spec)
                waiting.insert(0, item.spec)
        time.sleep(0.2)
    for item in running:
        item.process.send_signal(signal.SIGTERM)
        _say(first, f"stops  {item.spec.name}")
    until = time.monotonic() + _SAVING_S
    for item in running:
        try:
            item.process.wait(max(0.1, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            item.process.kill()
    return all(run.is_done() for run in plan.runs)


def _start(run: RunSpec, command: list[str], precision: str, cores: list[int]) -> subprocess.Popen[bytes]:
    run.folder.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, AUTO_PRECISION: precision, RUN_ID: run.id, "OMP_NUM_THREADS": "1"}
    with run.log.open("ab") as log:
        pin = partial(os.sched_setaffinity, 0, cores)
        return subprocess.Popen(command, stdout=log, stderr=log, env=environment, preexec_fn=pin)


def _say(first: float, text: str) -> None:
    print(f"{time.monotonic() - first:6.1f} s  {text}", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns 0 if all runs are done, else the exit code that asks to be called again."""
    parser = OneLineParser(
        prog="python -m benchmarks.gpu quarter-hour",
        description=f"{__doc__}\nAll runs done: exit code 0, and a report for each. Time over: {EXIT_REQUEUE}.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = "comparisons, one after the other; keys are of all of them"
    parser.add_argument("words", nargs="+", metavar="CONFIG | key=value", help=what)
    limit = "after which runs save and end, some 20 seconds"
    parser.add_argument("--limit", type=float, required=True, metavar="SECONDS", help=limit)
    arguments = parser.parse_args(argv)
    until = time.monotonic() + arguments.limit
    keys = [word for word in arguments.words if "=" in word]
    # All are checked before any begins.
    plans = [make_plan(word, keys) for word in arguments.words if "=" not in word]
    for plan in plans:
        check(plan)
        check_data(plan)
        check_pretraining(plan)
    return 0 if all(_compare(plan, until) for plan in plans) else EXIT_REQUEUE


def _compare(plan: ComparisonPlan, until: float) -> bool:
    """Runs a comparison until `time.monotonic()` is `until`, and writes its report; returns whether it is done."""
    plan.folder.mkdir(parents=True, exist_ok=True)
    precision = shared_precision(plan.config, read_protocol(plan.folder)["precision"])
    print(f"{plan.folder}, precision {precision}", flush=True)
    keep_protocol(plan, precision=precision.precision)
    steps = {}
    if any(run.equal_compute for run in plan.runs):
        foreseen = zip(plan.runs, foresee_runs(plan), strict=True)
        steps = {run: early.steps for run, early in foreseen if early.steps is not None}
    if not run_all(plan, precision.precision, steps, until):
        return False
    for run, number in steps.items():
        recorded = run.determined()["train.steps"]
        assert recorded == number, f"{run.name} took {number} steps; equal compute is {recorded}"
    write_report(plan)
    return True


if __name__ == "__main__":
    sys.exit(main())
