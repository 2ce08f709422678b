"""Whether training waits for its data: `mae_cifar_tiny` from shards against ready-made batches.

Both are whole runs of `pretrain/run.py`'s path on DeepSpeed, with crop and flip on the one side, on some ranks, in
turns: the time of a step from shards over that on ready-made batches (at most 1.03), and the share of time that
the run itself says it waited.

    python benchmarks/end_to_end.py [--data data/cifar10] [--rounds 15] [--out FILE]
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

# So that a checkout runs without being installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness.command import make_parser, parse, publish, run
from benchmarks.harness.turns import Life, ratios, summarize, take_turns, verdict
from benchmarks.harness.workloads import TINY, Workload, lengths, live, load_for
from mae_vit.core.batch import Batch
from mae_vit.core.files import read_json_lines
from mae_vit.pretraining.setup import set_up
from mae_vit.runtime.ranks import find_ranks, free_port
from mae_vit.training.engines.build import build_engine, init_process_group

SHARDS, READY = "shards", "ready-made"
AT_MOST = 1.03


def life(workload: Workload, kind: str, world_size: int, folder: Path, pipe: Connection) -> None:
    """A contender: rank 0 and, in processes of their own, the others."""
    place, process = (world_size, free_port(), folder), get_context("spawn").Process
    others = [process(target=run_rank, args=(workload, kind, n, *place, None)) for n in range(1, world_size)]
    for other in others:
        other.start()
    run_rank(workload, kind, 0, *place, pipe)
    for other in others:
        other.join()


def run_rank(
    workload: Workload,
    kind: str,
    rank: int,
    world_size: int,
    port: int,
    folder: Path,
    pipe: Connection | None,
) -> None:
    """A rank's whole run."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in {**place, **address}.items()})
    ranks = find_ranks()
    setup = set_up(workload.config, ranks)
    torch.set_num_threads(workload.threads)
    init_process_group(setup.config, setup.device, ranks)
    engine = build_engine(setup.config, setup.plan, setup.build(), ranks, setup.device)

    def from_shards() -> Iterator[Batch]:
        return setup.data.batches(ranks, setup.plan, 0, ())

    def ready_made() -> Iterator[Batch]:
        # In the host's memory, as the loader leaves them.
        share = replace(workload, batch_size=setup.plan.batch_size_per_device)
        batch_of = share.batches(torch.device("cpu"), pinned=setup.data.pin_memory)
        yield from map(batch_of, range(setup.plan.total_steps))

    source = from_shards if kind == SHARDS else ready_made
    live(replace(workload, config=setup.config), setup.plan, engine, source, pipe, folder=folder)


def waited(folder: Path, steps: int) -> list[float]:
    """The shares of waiting that a run logged for second halves of turns: first ones wait for the turn."""
    lines = read_json_lines(folder / "metrics.jsonl")
    return [line["data_wait_frac"] for line in lines[2:] if line["step"] % steps == 0]


def main() -> None:
    """Runs both and prints the ratio."""
    counts = {"rounds": 5, "steps": 10, "threads": 1}
    parser = make_parser(__doc__, config=TINY, batch=256, precision="auto", device="cpu", **counts)
    parser.add_argument("--data", default="data/cifar10", metavar="DIR", help="prepared data (data/cifar10)")
    parser.add_argument("--ranks", type=int, default=2, metavar="N", help="processes of each run (2)")
    arguments = parse(parser)
    if arguments.steps % 2:
        parser.error(f"--steps {arguments.steps}: an even number, a line of the log is written twice a turn")
    length = lengths(turns=arguments.rounds + 1, steps=arguments.steps, batch_size=arguments.batch)
    words = (f"monitor.log_every_steps={arguments.steps // 2}", "train.engine=deepspeed")
    workload = load_for(arguments, *length, f"data.path={arguments.data}", *words)
    with tempfile.TemporaryDirectory(prefix="mae-vit-benchmark-") as scratch:
        folders = {kind: Path(scratch) / kind for kind in (READY, SHARDS)}
        lives: dict[str, Life] = {
            kind: partial(life, workload, kind, arguments.ranks, folder) for kind, folder in folders.items()
        }
        times = take_turns(lives, rounds=arguments.rounds, steps=arguments.steps)
        waits = waited(folders[SHARDS], arguments.steps)
    ratio = summarize(ratios(times[SHARDS], times[READY]))
    results: dict[str, Any] = {
        "ms_per_step": {kind: summarize(values, 2) for kind, values in times.items()},
        "time_over_ready_made": ratio,
        **verdict(ratio["range"], at_most=AT_MOST),
        "data_wait_frac": summarize(waits, 5),
    }
    report = {"benchmark": "end_to_end", "clock": "wall", "results": results}
    names = ("config", "ranks", "batch", "precision", "rounds", "steps", "threads", "device")
    publish(report, arguments, *names, world_size=arguments.ranks)


if __name__ == "__main__":
    run(main)
