"""What grows with size and what must not: start-up, memory of workers, look-ups, ranks, saves. Prints JSON.

Starts are those of `pretrain/run.py` over real shards under up to 100,000 names and an index of up to
100 million samples (`benchmarks/scaling/synthetic_shards.py`), each in a new process, in turn; weak scaling is that of
`mae_cifar_tiny` under `deepspeed`; saves are those of ViT-B's and ViT-L's whole training state.

    python benchmarks/scale.py [--parts start ranks saving] [--rounds 5] [--data data/cifar10] [--out FILE]

Each part is written to FILE when it ends, with its command, commit and machine; parts that are not measured stay as
they are. Stalls of saves have a median and a maximum. On two quiet cores: start 5 minutes, ranks 8, saving 5.

Needs 3 GB of disk for the index and 8 GB for saves (--scratch DIR says where), and 12 GB of memory.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

# So that a checkout runs without being installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness.reports import measured_on, write_part
from benchmarks.scaling.ranks import BATCH_PER_RANK, scale_ranks
from benchmarks.scaling.saving import disk_and_hash, save_states
from benchmarks.scaling.stages import LOOKUP_BATCH, WORKERS
from benchmarks.scaling.synthetic_shards import write_many_shards

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("start", "ranks", "saving")
SHARDS = (1_000, 10_000, 100_000)
SHARD_SAMPLES = 1_000
STATES = ("mae_base", "mae_large")


def measure_starts(scratch: Path, rounds: int) -> dict[str, Any]:
    """Starts over folders of all sizes, in turn; medians by the number of shards."""
    folders = {shards: scratch / f"{shards}-shards" for shards in SHARDS}
    samples = {
        shards: write_many_shards(folder, shards=shards, shard_samples=SHARD_SAMPLES)
        for shards, folder in folders.items()
    }
    starts_by_shards: dict[int, list[dict[str, Any]]] = {shards: [] for shards in SHARDS}
    for _ in range(rounds):
        for shards, folder in folders.items():
            starts_by_shards[shards].append(measure_start(folder))
    for folder in folders.values():
        shutil.rmtree(folder)
    results = {}
    for shards, starts in starts_by_shards.items():
        totals = [start["total_s"] for start in starts]
        spread = {"total_range_s": [min(totals), max(totals)], "totals_s": totals}
        results[str(shards)] = {"samples": samples[shards], **median_of(starts), **spread}
    return {"workers": WORKERS, "lookup_batch": LOOKUP_BATCH, "by_shards": results}


def median_of(measured: list[Any]) -> Any:
    """The median of each number of equal nested dictionaries."""
    if isinstance(measured[0], dict):
        return {key: median_of([each[key] for each in measured]) for key in measured[0]}
    return round(statistics.median(measured), 3)


def measure_start(folder: Path) -> dict[str, Any]:
    """One start, in a new process."""
    command = [sys.executable, "-W", "ignore", str(ROOT / "benchmarks" / "scaling" / "start.py"), str(folder)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if ended.returncode:
        sys.exit(f"{' '.join(command)}\n{ended.stdout[-2000:]}{ended.stderr[-2000:]}")
    measured: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return measured


def measure(part: str, data: Path, scratch: Path, *, rounds: int, steps: int) -> dict[str, Any]:
    """Measures one part."""
    if part == "start":
        return measure_starts(scratch, rounds)
    if part == "ranks":
        by_ranks = scale_ranks(data, scratch, ranks=(1, 2), steps=steps, rounds=rounds)
        return {"model": "mae_cifar_tiny", "batch_per_rank": BATCH_PER_RANK, "by_ranks": by_ranks}
    return {"machine": disk_and_hash(scratch), "states": save_states(STATES, scratch, rounds=rounds)}


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what to measure (all)")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="times that each is measured (5)")
    parser.add_argument("--steps", type=int, default=60, metavar="N", help="of each run over ranks (60)")
    parser.add_argument("--data", type=Path, default=Path("data/cifar10"), metavar="DIR", help="for ranks")
    parser.add_argument("--scratch", type=Path, metavar="DIR", help="where to write (a new temporary folder)")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="write the JSON here too; other parts in it stay"
    )
    arguments = parser.parse_args()
    if "ranks" in arguments.parts and not (arguments.data / "dataset.json").exists():
        parser.error(
            f"{arguments.data} holds no shards: mae-vit prepare cifar10 {arguments.data}, or --data DIR"
        )
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=arguments.scratch) as scratch:
        for part in arguments.parts:
            # Of this part alone: others may come from another commit, command or machine.
            environment = measured_on(threads=threads_of(part), world_size=1)
            measured = measure(
                part, arguments.data.resolve(), Path(scratch), rounds=arguments.rounds, steps=arguments.steps
            )
            results[part] = {"rounds": arguments.rounds, **measured, "environment": environment}
            if arguments.out:
                write_part(arguments.out, "scale", part, results[part])
    print(json.dumps({"benchmark": "scale", "results": results}, indent=2))


def threads_of(part: str) -> int:
    """Torch's threads in the processes that a part measures: only saves run in this one."""
    return torch.get_num_threads() if part == "saving" else 1


if __name__ == "__main__":
    main()
