"""What engines and the training loop cost over a bare PyTorch step, in milliseconds.

The whole path of `pretrain/run.py` (run folder, hooks, guard, watchdog, log, TensorBoard) on
ready-made batches, on the torch engine and on DeepSpeed at ZeRO 0 and 1, one process each,
in turns with a plain loop of the same objective, optimizer and precision. The batch is
small, so that the cost shows: it hardly depends on it.

A turn is a whole window of the log (`monitor.log_every_steps`, 20 steps), so each turn has all that
a run does: the line of metrics, TensorBoard, and the wait for the device before it. The figure is the
mean over rounds of the difference from the plain loop in the same round, with its standard error
and 95 % interval. A limit is met, or missed, if the whole interval is on one side of it. Prints JSON.

60 rounds take 5 minutes on two quiet CPU cores; 20 rounds take 2.

    python benchmarks/engine.py [--config configs/mae_cifar_tiny.yaml] [--batch 8] [--precision auto]
        [--rounds 60] [--steps 20] [--threads 1] [--device cpu] [--only torch ...] [--out FILE]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
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
    mean_difference,
    paired,
    serve,
    summarize,
    take_turns,
)
from benchmarks.harness.workloads import TINY, Workload, load
from mae_vit.config.load import load_config
from mae_vit.config.plan import make_plan
from mae_vit.core.batch import Batch
from mae_vit.core.errors import InputError
from mae_vit.models.attention import choose_attention
from mae_vit.objectives.pretrain_config import PretrainConfig
from mae_vit.runtime.ranks import find_ranks
from mae_vit.training.engines.build import build_engine, init_process_group, optimizer_options
from mae_vit.training.engines.precision import Precision, choose_precision
from mae_vit.training.optim.optimizers import make_optimizer

BARE = "bare"
# What each may cost over the bare step, in ms (our limits), and the options that choose it.
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
    init_process_group(workload.config, device)
    config, samples = workload.config, 1000 * workload.batch_size
    plan = make_plan(config, num_samples=samples, world_size=1)
    engine = build_engine(config, plan, workload.objective(), ranks, device)
    batch_of = workload.batches(device)

    def source() -> Iterator[Batch]:
        for step in range(plan.total_steps):
            yield batch_of(step)

    with tempfile.TemporaryDirectory(prefix="mae-vit-benchmark-") as folder:
        live(config, plan, workload.info, engine, source, pipe, folder=Path(folder) / "run")


def run_contenders(
    config: Path,
    overrides: Sequence[str],
    *,
    engines: Sequence[str],
    batch_size: int,
    precision: Precision,
    threads: int,
    turns: int,
    steps: int,
) -> dict[str, Life]:
    """Runs of a config, one for each engine, whose lengths are those of turns; one micro-batch is a step."""
    common = [
        *overrides,
        *lengths(turns=turns, steps=steps, batch_size=batch_size),
        *("train.batch_size_per_device=null", f"train.precision={precision}"),
    ]
    return {
        name: partial(
            engine_life,
            load(
                config,
                [*common, *ENGINES[name][1]],
                batch_size=batch_size,
                precision=precision,
                threads=threads,
            ),
        )
        for name in engines
    }


def contenders(arguments: argparse.Namespace) -> dict[str, Life]:
    """The bare loop, and runs."""
    batch_size, precision, threads = arguments.batch, arguments.precision, arguments.threads
    bare = load(arguments.config, [], batch_size=batch_size, precision=precision, threads=threads)
    runs = run_contenders(
        arguments.config,
        [],
        engines=arguments.only,
        batch_size=batch_size,
        precision=precision,
        threads=threads,
        turns=arguments.rounds + 1,
        steps=arguments.steps,
    )
    return {BARE: partial(bare_life, bare), **runs}


def compare(times: dict[str, list[float]]) -> dict[str, Any]:
    """The cost of each engine over the bare step, round by round, against our limit."""
    results: dict[str, Any] = {
        BARE: {"ms_per_step": summarize(times[BARE]), "turns_ms": rounded(times[BARE])}
    }
    for name, values in times.items():
        if name != BARE:
            over = mean_difference(paired(values, times[BARE], lambda value, bare: value - bare))
            limit = ENGINES[name][0]
            results[name] = {
                "ms_per_step": summarize(values),
                "ms_over_bare": over,
                **at_most(limit, over["interval_95"]),
                "turns_ms": rounded(values),
            }
    return results


def rounded(values: list[float]) -> list[float]:
    """Milliseconds per step of all turns, in the order of rounds."""
    return [round(value, 3) for value in values]


def window(config: Path, steps: int | None) -> int:
    """Steps of a turn: whole windows of the log, so that each turn has as many lines of it.

    Raises:
        InputError: for a number of steps that cuts a window.
    """
    every = load_config(PretrainConfig, config, []).monitor.log_every_steps
    if steps is not None and steps % every:
        raise InputError(f"--steps {steps}: a multiple of monitor.log_every_steps, {every}: turns log alike")
    return steps or every


def main() -> None:
    """Measures all engines and prints what they cost."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--config", type=Path, default=TINY, metavar="FILE", help="whose step (mae_cifar_tiny)"
    )
    parser.add_argument("--batch", type=int, default=8, metavar="N", help="images per step (8)")
    add_precision(parser)
    parser.add_argument(
        "--only", nargs="+", choices=ENGINES, default=list(ENGINES), help="some engines (all of them)"
    )
    add_options(parser, rounds=60, steps=20, threads=1)
    parser.set_defaults(steps=None)
    add_out(parser)
    arguments = parser.parse_args()
    if arguments.rounds < 2:
        parser.error(f"--rounds {arguments.rounds}: two or more, for a standard error")
    device = choose_device(arguments.device)
    arguments.precision = choose_precision(arguments.precision, device).precision
    try:
        arguments.steps = window(arguments.config, arguments.steps)
    except InputError as error:
        parser.exit(2, f"error: {error}\n")
    times = take_turns(
        contenders(arguments), rounds=arguments.rounds, steps=arguments.steps, clock=arguments.clock
    )
    names = ("batch", "precision", "rounds", "steps", "threads", "device", "clock")
    report = {
        "benchmark": "engine",
        "config": arguments.config.stem,
        **{name: getattr(arguments, name) for name in names},
        "results": compare(times),
    }
    publish(report, arguments.out, threads=arguments.threads)


if __name__ == "__main__":
    main()
