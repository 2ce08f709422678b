"""Contenders in processes of their own that take turns, so that ratios hold where absolute times drift."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch

# The life of a contender: builds what it measures, then answers each number of steps that it
# receives with how long a step took, until it receives 0.
Life = Callable[[Connection], None]


def take_turns(
    lives: Mapping[str, Life], *, rounds: int, steps: int, clock: str = "wall"
) -> dict[str, list[float]]:
    """Measures all contenders in turn, round after round, after one that warms up.

    Args:
        lives: by name; they must be picklable.
        rounds: turns of each contender that count.
        steps: of a turn.
        clock: "wall", or "cpu" for what processes computed, all threads together.

    Returns:
        Milliseconds per step of each contender's turns, in the order of rounds.
    """
    context = multiprocessing.get_context("spawn")
    pipes, processes = {}, []
    for name, life in lives.items():
        pipes[name], theirs = context.Pipe()
        processes.append(context.Process(target=life, args=(theirs,), name=name))
        processes[-1].start()
        # With one end alone open, a contender that dies is noticed.
        theirs.close()
    times: dict[str, list[float]] = {name: [] for name in pipes}
    for round_number in range(rounds + 1):
        # Back and forth, so that a slow drift favors neither the first nor the last.
        for name in list(pipes) if round_number % 2 else reversed(pipes):
            milliseconds = _turn(name, pipes[name], steps)[clock]
            if round_number:
                times[name].append(milliseconds)
    for pipe in pipes.values():
        pipe.send(0)
    for process in processes:
        process.join()
    return times


def _turn(name: str, pipe: Connection, steps: int) -> dict[str, float]:
    try:
        pipe.send(steps)
        taken: dict[str, float] = pipe.recv()
        return taken
    except (EOFError, BrokenPipeError):
        raise SystemExit(f'error: contender "{name}" has died: its own message says why') from None


class Stopwatch:
    """Times a turn from its making on."""

    def __init__(self, device: torch.device) -> None:
        """Begins, once a GPU has done all it was given."""
        synchronize(device)
        self._device, self._wall, self._cpu = device, time.perf_counter(), time.process_time()

    def per_step(self, steps: int) -> dict[str, float]:
        """Milliseconds per step by both clocks."""
        synchronize(self._device)
        wall, cpu = time.perf_counter() - self._wall, time.process_time() - self._cpu
        return {"wall": wall / steps * 1e3, "cpu": cpu / steps * 1e3}


def serve(step: Callable[[int], None], pipe: Connection, device: torch.device) -> None:
    """Lives as a contender that takes plain steps."""
    done = 0
    while steps := pipe.recv():
        watch = Stopwatch(device)
        for number in range(done, done + steps):
            step(number)
        pipe.send(watch.per_step(steps))
        done += steps


def synchronize(device: torch.device) -> None:
    """Waits until a GPU has done all it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def choose_device(name: str) -> torch.device:
    """Makes this process and those that it starts run on "cpu" or "cuda".

    Raises:
        SystemExit: if there is no such device.
    """
    if name == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    elif not torch.cuda.is_available():
        raise SystemExit("error: --device cuda: no GPU is seen here")
    return torch.device(name)


def add_precision(parser: argparse.ArgumentParser) -> None:
    """Adds the precision of steps."""
    parser.add_argument(
        "--precision",
        choices=("auto", "fp32", "bf16"),
        default="auto",
        help="of steps (auto: as of runs here)",
    )


def add_options(parser: argparse.ArgumentParser, *, rounds: int, steps: int, threads: int) -> None:
    """Adds the options of turns, with a benchmark's defaults."""
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where it runs (cpu)")
    parser.add_argument(
        "--rounds", type=int, default=rounds, metavar="N", help=f"turns of each contender ({rounds})"
    )
    parser.add_argument("--steps", type=int, default=steps, metavar="N", help=f"steps in a turn ({steps})")
    parser.add_argument(
        "--threads", type=int, default=threads, metavar="N", help=f"threads of each contender ({threads})"
    )
    parser.add_argument(
        "--clock",
        choices=("wall", "cpu"),
        default="wall",
        help="cpu: only what each process computed, for a machine that others use too (wall)",
    )


def summarize(values: Sequence[float], digits: int = 3) -> dict[str, Any]:
    """Median and range of repeated measurements."""
    spread = [round(min(values), digits), round(max(values), digits)]
    return {"median": round(statistics.median(values), digits), "range": spread}


def paired(
    first: Sequence[float], second: Sequence[float], of: Callable[[float, float], float]
) -> list[float]:
    """Compares two contenders round by round."""
    return [of(a, b) for a, b in zip(first, second, strict=True)]


def at_most(limit: float, interval: Sequence[float]) -> dict[str, Any]:
    """A limit and whether it is met: by the whole of an interval or a range, or by none of it."""
    low, high = interval
    return {
        "at_most": limit,
        "verdict": "met" if high <= limit else "missed" if low > limit else "unresolved",
    }


def at_least(goal: float, interval: Sequence[float]) -> dict[str, Any]:
    """The same of a goal."""
    low, high = interval
    return {"at_least": goal, "verdict": "met" if low >= goal else "missed" if high < goal else "unresolved"}


def mean_difference(differences: Sequence[float], digits: int = 3) -> dict[str, Any]:
    """Mean of paired differences with its standard error and a 95 % interval (Student's t).

    The mean counts what happens in one round of many, which a median leaves out. The interval takes rounds as
    independent.

    Raises:
        ValueError: for fewer than two rounds, which have no standard error.
    """
    if len(differences) < 2:
        raise ValueError("a standard error takes two rounds or more")
    from scipy.stats import t

    mean = statistics.mean(differences)
    error = statistics.stdev(differences) / len(differences) ** 0.5
    half = float(t.ppf(0.975, len(differences) - 1)) * error
    return {
        "mean": round(mean, digits),
        "standard_error": round(error, digits),
        "interval_95": [round(mean - half, digits), round(mean + half, digits)],
        **summarize(differences, digits),
    }
