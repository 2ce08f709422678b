"""What grows with size and what must not: start-up, memory of workers, look-ups, compiling, ranks, saves.

Starts are those of `pretrain/run.py` over real shards under up to 100,000 names and an index of up to
100 million samples (`benchmarks/scaling/synthetic_shards.py`), each in a new process, in turn, and those of runs that
compile (`benchmarks/scaling/compiled.py`); weak scaling is that of `mae_cifar_tiny` under `deepspeed`; saves are those
of ViT-B's and ViT-L's whole training state, on a GPU where there is one.

    python benchmarks/scale.py [--parts start compile ranks saving] [--data data/cifar10] [--out FILE]

Each part is written to FILE when it ends, with its command, commit and machine; parts that are not measured stay as
they are. On two quiet cores: start 5 minutes, compile 10, ranks 8, saving 5. Needs 3 GB of disk for the index and 8 GB
for saves (--scratch DIR says where), and 12 GB of memory.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

# So that a checkout runs without being installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness.command import ROOT, make_parser, measured_on, parse, run
from benchmarks.harness.workloads import load
from benchmarks.scaling.compiled import measure_compiled_starts
from benchmarks.scaling.start import LOOKUP_BATCH, WORKERS
from benchmarks.scaling.synthetic_shards import write_many_shards
from mae_vit.config.presets import find_config
from mae_vit.config.schema import CheckpointSection
from mae_vit.core.errors import InputError
from mae_vit.core.files import read_json, read_json_lines, to_json, write_json
from mae_vit.runtime.ranks import free_port
from mae_vit.training.checkpoints.saver import Saver
from mae_vit.training.engines.state import LossHistory
from mae_vit.training.engines.torch_engine import TorchEngine

PARTS = ("start", "compile", "ranks", "saving")
SHARDS = (1_000, 10_000, 100_000)
SHARD_SAMPLES = 1_000
RANKS, BATCH_PER_RANK = (1, 2), 128
# Steps of each run over ranks, and those of them that are not counted.
_STEPS, _WARM_UP_STEPS = 60, 10
_HASHED_BYTES = 1 << 28
STATES = ("mae_base", "mae_large")


def measure_starts(scratch: Path, *, rounds: int) -> dict[str, Any]:
    """Starts over folders of so many shards, in turn; medians by the number of shards."""
    folders = {shards: scratch / f"{shards}-shards" for shards in SHARDS}
    samples = {
        shards: write_many_shards(folder, shards=shards, shard_samples=SHARD_SAMPLES)
        for shards, folder in folders.items()
    }
    starts: dict[int, list[dict[str, Any]]] = {shards: [] for shards in SHARDS}
    for _ in range(rounds):
        for shards, folder in folders.items():
            starts[shards].append(measure_start(folder))
    for folder in folders.values():
        shutil.rmtree(folder)
    results = {}
    for shards, measured in starts.items():
        totals = [start["total_s"] for start in measured]
        spread = {"total_range_s": [min(totals), max(totals)], "totals_s": totals}
        results[str(shards)] = {"samples": samples[shards], **_median_of(measured), **spread}
    return {"workers": WORKERS, "lookup_batch": LOOKUP_BATCH, "by_shards": results}


def _median_of(measured: list[Any]) -> Any:
    """The median of each number of equal nested dictionaries."""
    if isinstance(measured[0], dict):
        return {key: _median_of([each[key] for each in measured]) for key in measured[0]}
    return round(statistics.median(measured), 3)


def measure_start(folder: Path) -> dict[str, Any]:
    """One start, in a new process."""
    command = [sys.executable, "-W", "ignore", str(ROOT / "benchmarks" / "scaling" / "start.py"), str(folder)]
    measured: dict[str, Any] = json.loads(_run(command).splitlines()[-1])
    return measured


def _run(command: list[str], **options: Any) -> str:
    """Runs a command of this Python's in the checkout; returns what it printed, or ends with that if it failed."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PATH": path}
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment, **options)
    if ended.returncode:
        sys.exit(f"{' '.join(command)}\n{ended.stdout[-2000:]}{ended.stderr[-2000:]}")
    return ended.stdout


def scale_ranks(data: Path, scratch: Path, *, rounds: int) -> dict[str, Any]:
    """Trains `mae_cifar_tiny` on the shards in `data` on each number of ranks in turn, the smallest first.

    Raises InputError if ranks cannot have a core each.
    """
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if len(cores) < RANKS[-1]:
        raise InputError(f"{RANKS[-1]} ranks need a core each to be bound to; this system gives {len(cores)}")
    rates: dict[int, list[float]] = {number: [] for number in RANKS}
    for round_number in range(rounds):
        for number in RANKS:
            folder = scratch / f"ranks-{number}-{round_number}"
            rates[number].append(_train(data, folder, cores[:number]))
    medians = {number: statistics.median(values) for number, values in rates.items()}
    alone = medians[RANKS[0]] / RANKS[0]
    return {
        str(number): {
            "images_per_s": round(medians[number], 1),
            "images_per_s_per_rank": round(medians[number] / number, 1),
            "range": [round(min(rates[number]), 1), round(max(rates[number]), 1)],
            "efficiency": round(medians[number] / number / alone, 3),
        }
        for number in RANKS
    }


def _train(data: Path, folder: Path, cores: list[int]) -> float:
    """Trains on a rank for each core; returns the images/s of all ranks, the median over lines of the log."""
    ranks = len(cores)
    command = [
        *("deepspeed", "--num_accelerators", str(ranks), "--master_port", str(free_port())),
        *("pretrain/run.py", "--config", "configs/pretrain/mae_cifar_tiny.yaml"),
        *(f"data.path={data}", f"run.dir={folder}"),
        *("train.epochs=null", f"train.steps={_STEPS}", "train.warmup_epochs=0", "monitor.log_every_steps=5"),
        *(f"train.effective_batch_size={ranks * BATCH_PER_RANK}", "monitor.probe_queries=0"),
        *("monitor.evaluate_images=64",),
    ]
    # One core for each rank: a rank alone would compute on all of them.
    _run(command, preexec_fn=partial(os.sched_setaffinity, 0, cores))
    lines = read_json_lines(folder / "metrics.jsonl")
    counted = (line for line in lines if "images_per_s" in line and line["step"] > _WARM_UP_STEPS)
    return statistics.median(line["images_per_s"] for line in counted)


def disk_and_hash(scratch: Path) -> dict[str, float]:
    """What the machine gives, in GB/s: one file written and forced to the disk, and SHA-256 on one core."""
    data = os.urandom(_HASHED_BYTES)
    begun = time.perf_counter()
    hashlib.sha256(data).digest()
    hashed = time.perf_counter()
    with (scratch / "probe").open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    written = time.perf_counter()
    (scratch / "probe").unlink()
    return {
        "write_gb_s": round(_HASHED_BYTES / (written - hashed) / 1e9, 2),
        "sha256_gb_s": round(_HASHED_BYTES / (hashed - begun) / 1e9, 2),
    }


def build_full(name: str) -> TorchEngine:
    """An engine of a config's objective after one update: every slot of the optimizer is there."""
    config = find_config(name)
    workload = load(config, [], batch_size=1, precision="bf16", threads=torch.get_num_threads())
    engine = workload.engine(workload.device())
    for parameter in engine.trainable.values():
        parameter.grad = torch.full_like(parameter, 1e-3)
    engine.step(1e-4)
    return engine


def save_rounds(engine: TorchEngine, folder: Path, *, rounds: int) -> dict[str, Any]:
    """Saves an engine's state some times; each write is waited for, as a run with time between saves."""
    options = CheckpointSection(every_steps=1, keep_last=1)
    saver = Saver(engine, folder, options, identity={}, every_steps=1, say=print)
    stalls, writes, pauses = [], [], []
    for step in range(1, rounds + 1):
        saver.stall_s = 0.0
        saver.save(step, None, LossHistory(), wait=False)
        begun = time.perf_counter()
        pauses.append(_longest_pause())
        writes.append(time.perf_counter() - begun)
        saver.wait()
        stalls.append(saver.stall_s)
    size = sum(file.stat().st_size for file in (folder / f"step-{rounds:08d}").iterdir())
    shutil.rmtree(folder)
    return {
        "checkpoint_gb": round(size / 1e9, 3),
        "stall_s": _spread(stalls),
        "write_s": _spread(writes),
        "longest_pause_while_written_s": _spread(pauses),
    }


def _longest_pause() -> float:
    """How long at most a thread beside the one that saves stood still, until that is through.

    Training goes on in such a thread: what holds the interpreter's lock holds it up as well.
    """
    longest, last = 0.0, time.perf_counter()
    while any(thread.name == "saver" for thread in threading.enumerate()):
        time.sleep(0.001)
        now = time.perf_counter()
        longest, last = max(longest, now - last), now
    return longest


def _spread(values: list[float]) -> dict[str, float]:
    found = {"median": statistics.median(values), "min": min(values), "max": max(values)}
    return {name: round(value, 3) for name, value in found.items()}


def measure(part: str, data: Path, scratch: Path, rounds: int) -> dict[str, Any]:
    """Measures one part."""
    if part == "start":
        return measure_starts(scratch, rounds=rounds)
    if part == "compile":
        return measure_compiled_starts(scratch, rounds=rounds)
    if part == "ranks":
        by_ranks = scale_ranks(data, scratch, rounds=rounds)
        return {"model": "mae_cifar_tiny", "batch_per_rank": BATCH_PER_RANK, "by_ranks": by_ranks}
    states = {name: save_rounds(build_full(name), scratch / name, rounds=rounds) for name in STATES}
    return {"machine": disk_and_hash(scratch), "states": states}


def main() -> None:
    """Measures and prints."""
    parser = make_parser(__doc__, rounds=5)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what to measure (all)")
    parser.add_argument("--data", type=Path, default=Path("data/cifar10"), metavar="DIR", help="for ranks")
    parser.add_argument("--scratch", type=Path, metavar="DIR", help="where to write (a new temporary folder)")
    arguments = parse(parser)
    if "ranks" in arguments.parts and not (arguments.data / "dataset.json").exists():
        prepare = f"mae-vit prepare cifar10 {arguments.data}"
        raise InputError(f"{arguments.data} holds no shards: {prepare}, or --data DIR")
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=arguments.scratch) as scratch:
        for part in arguments.parts:
            # Only saves run in this process. Other parts of the file may come from another commit or machine.
            environment = measured_on(threads=torch.get_num_threads() if part == "saving" else 1)
            measured = measure(part, arguments.data.resolve(), Path(scratch), arguments.rounds)
            results[part] = {"rounds": arguments.rounds, **measured, "environment": environment}
            if arguments.out:
                kept = read_json(arguments.out)["results"] if arguments.out.exists() else {}
                whole = {"benchmark": "scale", "results": {**kept, part: results[part]}}
                write_json(arguments.out, whole)
    print(to_json({"benchmark": "scale", "results": results}, indent=2))


if __name__ == "__main__":
    run(main)
