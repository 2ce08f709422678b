"""What engines and the training loop cost over a bare PyTorch step, in milliseconds.

The whole path of `pretrain/run.py` (run folder, hooks, guard, watchdog, log, TensorBoard) on ready-made batches,
on the torch engine and on DeepSpeed at ZeRO 0 and 1, one process each, in turns with a plain loop of the same
objective, optimizer and precision. The batch is small, so that the cost shows: it hardly depends on it.

A turn is a window of the log (`monitor.log_every_steps`), so that each turn has all that a run does: the line of
metrics, TensorBoard, and the wait for the device before it. The figure is the mean over rounds of the difference
from the plain loop in the same round, which also counts what happens in one round of many, with its standard
error and 95 % interval (Student's t), as if rounds were independent. 60 rounds take 5 minutes on two quiet cores.

    python benchmarks/engine.py [--out FILE]
    python benchmarks/engine.py --device cuda --config mae_base --batch 32 --rounds 5 [train.compile=true]
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, islice
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import stats

# So that a checkout runs without being installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness.command import make_parser, parse, publish, run
from benchmarks.harness.turns import Life, Stopwatch, serve, summarize, take_turns, verdict
from benchmarks.harness.workloads import TINY, Workload, lengths, load_for
from mae_vit.config.plan import make_plan
from mae_vit.core.batch import Batch
from mae_vit.core.errors import InputError
from mae_vit.data.order.order import Skipped
from mae_vit.models.attention import choose_attention
from mae_vit.objectives.objective import Objective
from mae_vit.runtime.ranks import find_ranks
from mae_vit.training.engines.build import build_engine, init_process_group, optimizer_options
from mae_vit.training.engines.cost import Estimate
from mae_vit.training.identity import Identity, run_identity
from mae_vit.training.optim import make_optimizer
from mae_vit.training.outputs.run_folder import RunFolder
from mae_vit.training.run import run as run_job
from mae_vit.training.setup import TrainingSetup

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
    if workload.config.train.compile is True:
        objective.compile(dynamic=False)
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


@dataclass(frozen=True)
class InTurns(TrainingSetup):
    """A run that only trains; a turn ends when the loop asks for the batch after the turn's last."""

    workload: Workload
    pipe: Connection
    source = "scratch"

    @property
    def identity(self) -> Identity:
        """The config alone."""
        return run_identity(self.config, derived={})

    @property
    def costs(self) -> Estimate:
        """What a step costs."""
        return replace(self.workload, batch_size=self.batch_size).costs

    def build(self) -> Objective:
        """Builds encoder and objective."""
        return self.workload.objective()

    def batches(self, start_step: int, skipped: Skipped) -> Iterator[Batch]:
        """Yields batches, after the word for each turn."""
        source = map(self.workload.batches(self.device), count())
        while steps := self.pipe.recv():
            watch = Stopwatch(self.device)
            yield from islice(source, steps)
            self.pipe.send(watch.per_step(steps))
        yield next(source)

    def samples_of(self, data_step: int) -> list[dict[str, Any]]:
        """Names nothing."""
        return []

    def held_out(self) -> None:
        """Evaluates nothing."""

    def finish(self, *_: Any) -> tuple[dict[str, Any], Callable[[], None], list[str]]:
        """Leaves nothing."""
        return {}, lambda: None, []


def engine_life(workload: Workload, pipe: Connection) -> None:
    """A run on the config's engine, as `pretrain/run.py` runs it."""
    config, device = workload.config, workload.device()
    init_process_group(config, device)
    plan = make_plan(config, num_samples=1000 * workload.batch_size, world_size=1)
    data: Any = None  # the batches are ready-made
    setup = InTurns(config, find_ranks(), device, data, plan, workload, pipe)
    engine = build_engine(config, plan, setup.build(), setup.ranks, device)
    # What a run says is no part of the report.
    with tempfile.TemporaryDirectory(prefix="mae-vit-benchmark-") as folder, redirect_stdout(sys.stderr):
        run_job(setup, engine, RunFolder(Path(folder) / "run"), None)


def compare(times: dict[str, list[float]]) -> dict[str, Any]:
    """The cost of each engine over the bare step, round by round, against our limit."""
    results: dict[str, Any] = {}
    for name, values in times.items():
        cost = {}
        if name != BARE:
            over = mean_difference(np.subtract(values, times[BARE]))
            cost = {"ms_over_bare": over, **verdict(over["interval_95"], at_most=ENGINES[name][0])}
        turns = [round(value, 3) for value in values]
        results[name] = {"ms_per_step": summarize(values), **cost, "turns_ms": turns}
    return results


def mean_difference(differences: Sequence[float] | np.ndarray) -> dict[str, Any]:
    """Mean of two or more paired differences with its standard error and a 95 % interval."""
    mean, error = float(np.mean(differences)), float(stats.sem(differences))
    low, high = stats.t.interval(0.95, len(differences) - 1, loc=mean, scale=error)
    return {
        "mean": round(mean, 3),
        "standard_error": round(error, 3),
        "interval_95": [round(float(low), 3), round(float(high), 3)],
        **summarize(differences),
    }


def main() -> None:
    """Measures all engines and prints what they cost."""
    counts = {"rounds": 60, "threads": 1}
    arguments = parse(make_parser(__doc__, config=TINY, batch=8, precision="auto", device="cpu", **counts))
    if arguments.rounds < 2:
        raise InputError(f"--rounds {arguments.rounds}: two or more, for a standard error")
    bare = load_for(arguments)
    arguments.steps = bare.config.monitor.log_every_steps
    length = lengths(turns=arguments.rounds + 1, steps=arguments.steps, batch_size=arguments.batch)
    lives: dict[str, Life] = {BARE: partial(bare_life, bare)}
    for name, (_, options) in ENGINES.items():
        # One micro-batch is a step.
        workload = load_for(arguments, *length, "train.batch_size_per_device=null", *options)
        lives[name] = partial(engine_life, workload)
    times = take_turns(lives, rounds=arguments.rounds, steps=arguments.steps)
    report = {"benchmark": "engine", "clock": "wall", "results": compare(times)}
    publish(report, arguments, "config", "batch", "precision", "rounds", "steps", "threads", "device")


if __name__ == "__main__":
    run(main)
