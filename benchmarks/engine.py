"""What engines and the training loop cost over a bare PyTorch step, in milliseconds.

The whole path of `pretrain/run.py` (run folder, hooks, guard, watchdog, log, TensorBoard) on
ready-made batches, on the torch engine and on DeepSpeed at ZeRO 0 and 1, one process each,
in turns with a plain loop of the same objective, optimizer and precision. The batch is
small, so that the cost shows: it does not depend on it. Turns are of one step, for steps here vary by
more than what is measured, and slowly. Prints JSON.

    python benchmarks/engine.py [--batch 8] [--precision bf16] [--rounds 400] [--steps 1]
        [--threads 1] [--device cpu] [--only torch ...] [--out FILE]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

# So that a checkout runs without being installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.reports import add_out, publish
from benchmarks.runs import lengths, live
from benchmarks.turns import Life, add_options, choose_device, paired, serve, summarize, take_turns
from benchmarks.workloads import TINY, Workload, load
from mae_vit.batch import Batch
from mae_vit.encoder import choose_attention
from mae_vit.plan import make_plan
from mae_vit.training.distributed import find_ranks
from mae_vit.training.engines import build_engine, connect, optimizer_options
from mae_vit.training.optimizers import make_optimizer

BARE = "bare"
# What each may cost over the bare step, in ms, and the options that choose it.
ENGINES = {
    "torch": (1.0, ["train.engine=torch", "train.zero_stage=0"]),
    "ZeRO-0": (6.0, ["train.engine=deepspeed", "train.zero_stage=0"]),
    "ZeRO-1": (20.0, ["train.engine=deepspeed", "train.zero_stage=1"]),
}


def bare_life(workload: Workload, pipe: Connection) -> None:
    """The shortest loop that trains the same: no gradient norm, no log, nothing read."""
    torch.manual_seed(0)
    device = workload.device()
    objective = workload.objective().to(device)
    choose_attention(objective, device)
    optimizer = make_optimizer(objective, optimizer_options(workload.config))
    batch_of = workload.batches(device)

    def step(number: int) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 1e-4
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=workload.precision == "bf16"):
            loss = objective(batch_of(number)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    serve(step, pipe, device)


def engine_life(workload: Workload, pipe: Connection) -> None:
    """A run on the config's engine."""
    ranks, device = find_ranks(), workload.device()
    connect(workload.config, device)
    config, samples = workload.config, 1000 * workload.batch_size
    plan = make_plan(config, num_samples=samples, world_size=1)
    engine = build_engine(config, plan, workload.objective(), ranks, device)
    batch_of = workload.batches(device)

    def source() -> Iterator[Batch]:
        for step in range(plan.total_steps):
            yield batch_of(step)

    with tempfile.TemporaryDirectory(prefix="mae-vit-benchmark-") as folder:
        live(config, plan, workload.info, engine, source, pipe, folder=Path(folder) / "run")


def contenders(arguments: argparse.Namespace) -> dict[str, Life]:
    """The bare loop, and runs."""
    common = [
        *lengths(turns=arguments.rounds + 1, steps=arguments.steps, batch_size=arguments.batch),
        f"train.precision={arguments.precision}",
    ]
    setting = {
        "batch_size": arguments.batch,
        "precision": arguments.precision,
        "threads": arguments.threads,
    }
    lives: dict[str, Life] = {BARE: partial(bare_life, load(TINY, common, **setting))}
    for name in arguments.only:
        lives[name] = partial(engine_life, load(TINY, [*common, *ENGINES[name][1]], **setting))
    return lives


def compare(times: dict[str, list[float]]) -> dict[str, Any]:
    """The cost of each engine over the bare step, round by round, against its bar."""
    results: dict[str, Any] = {BARE: {"ms_per_step": summarize(times[BARE])}}
    for name, values in times.items():
        if name != BARE:
            over = summarize(paired(values, times[BARE], lambda own, bare: own - bare))
            bar = ENGINES[name][0]
            results[name] = {
                "ms_per_step": summarize(values),
                "ms_over_bare": over,
                "at_most": bar,
                "met": over["median"] <= bar,
            }
    return results


def main() -> None:
    """Measures all engines and prints what they cost."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch", type=int, default=8, metavar="N", help="images per step (8)")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="bf16", help="of steps (bf16)")
    parser.add_argument(
        "--only", nargs="+", choices=ENGINES, default=list(ENGINES), help="some engines (all of them)"
    )
    add_options(parser, rounds=400, steps=1, threads=1)
    add_out(parser)
    arguments = parser.parse_args()
    choose_device(arguments.device)
    times = take_turns(
        contenders(arguments), rounds=arguments.rounds, steps=arguments.steps, clock=arguments.clock
    )
    names = ("batch", "precision", "rounds", "steps", "threads", "device", "clock")
    report = {
        "benchmark": "engine",
        "config": TINY.stem,
        **{name: getattr(arguments, name) for name in names},
        "results": compare(times),
    }
    publish(report, arguments.out)


if __name__ == "__main__":
    main()
