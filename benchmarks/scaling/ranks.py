"""Weak scaling: the same work and one core for each of 1, 2, ... ranks, through the launcher, images/s of each rank."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

from mae_vit.core.files import read_json_lines
from mae_vit.runtime.ranks import free_port

ROOT = Path(__file__).resolve().parents[2]
BATCH_PER_RANK = 128
_WARM_UP_STEPS = 10


def scale_ranks(
    data: Path, scratch: Path, *, ranks: tuple[int, ...], steps: int, rounds: int
) -> dict[str, Any]:
    """Trains `mae_cifar_tiny` on each number of ranks in turn.

    Args:
        data: CIFAR-10's shards.
        scratch: for the runs.
        ranks: numbers of ranks, the smallest first.
        steps: of each run; the first ten are not counted.
        rounds: times that each number's turn comes.
    """
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if len(cores) < max(ranks):
        sys.exit(f"error: {max(ranks)} ranks need a core each to be bound to; this system gives {len(cores)}")
    rates: dict[int, list[float]] = {number: [] for number in ranks}
    for round_number in range(rounds):
        for number in ranks:
            folder = scratch / f"ranks-{number}-{round_number}"
            _train(data, folder, cores[:number], steps)
            rates[number].append(_images_per_s(folder))
    medians = {number: statistics.median(values) for number, values in rates.items()}
    alone = medians[ranks[0]] / ranks[0]
    return {
        str(number): {
            "images_per_s": round(medians[number], 1),
            "images_per_s_per_rank": round(medians[number] / number, 1),
            "range": [round(min(rates[number]), 1), round(max(rates[number]), 1)],
            "efficiency": round(medians[number] / number / alone, 3),
        }
        for number in ranks
    }


def _train(data: Path, folder: Path, cores: list[int], steps: int) -> None:
    ranks = len(cores)
    command = [
        *("deepspeed", "--num_accelerators", str(ranks), "--master_port", str(free_port())),
        *(
            "pretrain/run.py",
            "--config",
            "configs/mae_cifar_tiny.yaml",
            f"data.path={data}",
            f"run.dir={folder}",
        ),
        *("train.epochs=null", f"train.steps={steps}", "train.warmup_epochs=0", "monitor.log_every_steps=5"),
        *(f"train.effective_batch_size={ranks * BATCH_PER_RANK}", "monitor.probe_queries=0"),
        *("monitor.evaluate_images=64",),
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    # One core for each rank: a rank alone would compute on all of them.
    pin = partial(os.sched_setaffinity, 0, cores)
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, preexec_fn=pin)
    if ended.returncode:
        sys.exit(f"{' '.join(command)}\n{ended.stdout[-2000:]}{ended.stderr[-2000:]}")


def _images_per_s(folder: Path) -> float:
    """Median over log lines, over all ranks."""
    lines = read_json_lines(folder / "metrics.jsonl")
    return statistics.median(
        line["images_per_s"] for line in lines if "images_per_s" in line and line["step"] > _WARM_UP_STEPS
    )
