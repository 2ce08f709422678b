"""Whether training waits for its data: `mae_cifar_tiny` from shards against ready-made batches.

Both are whole runs of `pretrain/run.py`'s path on DeepSpeed, with crop and flip on the one
side, on some ranks, in turns. Prints JSON: the time of a step from shards over that on
ready-made batches (at most 1.03), and the share of time that the run itself says it waited.

    python benchmarks/end_to_end.py [--data data/cifar10] [--ranks 2] [--batch 256] [--precision auto]
        [--rounds 5] [--steps 10] [--threads 1] [--device cpu] [--out FILE] [KEY.PATH=VALUE ...]
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

# So that a checkout runs without being installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness.reports import add_out, publish
from benchmarks.harness.runs import lengths, live
from benchmarks.harness.turns import (
    Life,
    add_options,
    add_precision,
    at_most,
    choose_device,
    paired,
    summarize,
    take_turns,
)
from benchmarks.harness.workloads import TINY, Workload, load
from mae_vit.core.batch import Batch
from mae_vit.core.errors import InputError
from mae_vit.core.files import read_json_lines
from mae_vit.pretraining.setup import set_up
from mae_vit.runtime.ranks import find_ranks
from mae_vit.training.engines.build import build_engine, init_process_group
from mae_vit.training.engines.precision import choose_precision

SHARDS, READY = "shards", "ready-made"
AT_MOST = 1.03


@dataclass(frozen=True)
class Job:
    """A run on some ranks.

    Attributes:
        workload: what is trained.
        kind: where its batches come from.
        world_size: ranks.
        folder: of the run.
    """

    workload: Workload
    kind: str
    world_size: int
    folder: Path


def life(job: Job, pipe: Connection) -> None:
    """A contender: rank 0 and, in processes of their own, the others."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    process = get_context("spawn").Process
    others = [process(target=run_rank, args=(job, rank, port, None)) for rank in range(1, job.world_size)]
    for other in others:
        other.start()
    run_rank(job, 0, port, pipe)
    for other in others:
        other.join()


def run_rank(job: Job, rank: int, port: int, pipe: Connection | None) -> None:
    """A rank's whole run."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": job.world_size}
    address = {"LOCAL_WORLD_SIZE": job.world_size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in {**place, **address}.items()})
    ranks = find_ranks()
    setup = set_up(job.workload.config, ranks)
    torch.set_num_threads(job.workload.threads)
    init_process_group(setup.config, setup.device)
    engine = build_engine(setup.config, setup.plan, setup.build(), ranks, setup.device)

    def from_shards() -> Iterator[Batch]:
        return setup.data.batches(ranks, setup.plan, 0, ())

    def ready_made() -> Iterator[Batch]:
        # In the host's memory, as the loader leaves them.
        share = replace(job.workload, batch_size=setup.plan.batch_size_per_device)
        batch_of = share.batches(torch.device("cpu"), pinned=setup.data.pin_memory)
        for step in range(setup.plan.total_steps):
            yield batch_of(step)

    source = from_shards if job.kind == SHARDS else ready_made
    live(setup.config, setup.plan, setup.info, engine, source, pipe, folder=job.folder)


def waited(folder: Path, steps: int) -> list[float]:
    """The shares of waiting that a run logged for second halves of turns: first ones wait for the turn."""
    lines = read_json_lines(folder / "metrics.jsonl")
    return [line["data_wait_frac"] for line in lines[2:] if line["step"] % steps == 0]


def parse() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--config", type=Path, default=TINY, metavar="FILE", help="of the run (mae_cifar_tiny)"
    )
    parser.add_argument("--data", default="data/cifar10", metavar="DIR", help="prepared data (data/cifar10)")
    parser.add_argument("--ranks", type=int, default=2, metavar="N", help="processes of each run (2)")
    parser.add_argument("--batch", type=int, default=256, metavar="N", help="images per step (256)")
    add_precision(parser)
    parser.add_argument("overrides", nargs="*", metavar="KEY.PATH=VALUE", help="change a value of the config")
    add_options(parser, rounds=5, steps=10, threads=1)
    add_out(parser)
    arguments = parser.parse_intermixed_args()
    if arguments.steps % 2:
        parser.error(f"--steps {arguments.steps}: an even number, a line of the log is written twice a turn")
    return arguments


def main() -> None:
    """Runs both and prints the ratio."""
    arguments = parse()
    device = choose_device(arguments.device)
    arguments.precision = choose_precision(arguments.precision, device).precision
    length = lengths(turns=arguments.rounds + 1, steps=arguments.steps, batch_size=arguments.batch)
    overrides = [
        *length,
        f"data.path={arguments.data}",
        f"train.precision={arguments.precision}",
        f"monitor.log_every_steps={arguments.steps // 2}",
        *arguments.overrides,
    ]
    try:
        workload = load(
            arguments.config,
            overrides,
            batch_size=arguments.batch,
            precision=arguments.precision,
            threads=arguments.threads,
        )
    except InputError as error:
        raise SystemExit(f"error: {error}") from None
    with tempfile.TemporaryDirectory(prefix="mae-vit-benchmark-") as scratch:
        jobs = {kind: Job(workload, kind, arguments.ranks, Path(scratch) / kind) for kind in (READY, SHARDS)}
        lives: dict[str, Life] = {kind: partial(life, job) for kind, job in jobs.items()}
        times = take_turns(lives, rounds=arguments.rounds, steps=arguments.steps, clock=arguments.clock)
        waits = waited(jobs[SHARDS].folder, arguments.steps)
    ratio = summarize(paired(times[SHARDS], times[READY], lambda shards, ready: shards / ready))
    names = ("ranks", "batch", "precision", "rounds", "steps", "threads", "device", "clock")
    report: dict[str, Any] = {
        "benchmark": "end_to_end",
        "config": arguments.config.stem,
        **{name: getattr(arguments, name) for name in names},
        "results": {
            "ms_per_step": {kind: summarize(values, 2) for kind, values in times.items()},
            "time_over_ready_made": ratio,
            **at_most(AT_MOST, ratio["range"]),
            "data_wait_frac": summarize(waits, 5),
        },
    }
    publish(report, arguments.out, threads=arguments.threads, world_size=arguments.ranks)


if __name__ == "__main__":
    main()
