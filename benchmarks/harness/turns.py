"""Contenders in processes of their own that take turns, so that ratios hold where absolute times drift."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import count, islice
from multiprocessing.connection import Connection
from typing import Any, Literal

import numpy as np
import torch

from mae_vit.training.engines.precision import AUTOCAST_DTYPES, Precision

# The least total time in seconds and number of tries, and the longest time: where other processes compute too,
# most tries are slow.
_MEASURED_S, _TRIES, _LONGEST_S = 0.2, 50, 2.0
# The life of a contender: builds what it measures, then answers each number of steps that it
# receives with the milliseconds of a step by each clock, until it receives 0.
Life = Callable[[Connection], None]


def take_turns(
    lives: Mapping[str, Life], *, rounds: int, steps: int, clock: Literal["wall", "cpu"] = "wall"
) -> dict[str, list[float]]:
    """Measures all contenders (picklable, by name) in turn, round after round, after one that warms up.

    Returns the milliseconds per step of each contender's turns, in the order of rounds; by the clock "cpu" those of all
    threads of its process together.
    """
    context = multiprocessing.get_context("spawn")
    pipes: dict[str, Connection] = {}
    processes = []
    for name, life in lives.items():
        pipes[name], theirs = context.Pipe()
        processes.append(context.Process(target=life, args=(theirs,), name=name))
        processes[-1].start()
        # With one end alone open, a contender that dies is noticed.
        theirs.close()
    times: dict[str, list[float]] = {name: [] for name in pipes}
    try:
        for round_number in range(rounds + 1):
            # Back and forth, so that a slow drift favors neither the first nor the last.
            for name in list(pipes) if round_number % 2 else reversed(pipes):
                try:
                    pipes[name].send(steps)
                    milliseconds = pipes[name].recv()[clock]
                except (EOFError, BrokenPipeError):
                    raise SystemExit(
                        f'error: contender "{name}" has died: its own message says why'
                    ) from None
                if round_number:
                    times[name].append(milliseconds)
    finally:
        for pipe in pipes.values():
            with suppress(OSError):  # of one that has died
                pipe.send(0)
        for process in processes:
            process.join()
    return times


class Stopwatch:
    """Times a turn from its making on, once a GPU has done all it was given."""

    def __init__(self, device: torch.device) -> None:
        synchronize(device)
        self._device, self._wall, self._cpu = device, time.perf_counter(), time.process_time()

    def per_step(self, steps: int) -> dict[str, float]:
        """Milliseconds per step by both clocks."""
        synchronize(self._device)
        wall, cpu = time.perf_counter() - self._wall, time.process_time() - self._cpu
        return {"wall": wall / steps * 1e3, "cpu": cpu / steps * 1e3}


def timed(step: Callable[[int], object], device: torch.device) -> Callable[[int], dict[str, float]]:
    """What takes so many further steps, and returns the milliseconds of one by both clocks."""
    numbers = count()

    def take(steps: int) -> dict[str, float]:
        watch = Stopwatch(device)
        for number in islice(numbers, steps):
            step(number)
        return watch.per_step(steps)

    return take


def serve(step: Callable[[int], None], pipe: Connection, device: torch.device) -> None:
    """Lives as a contender that takes plain steps."""
    take = timed(step, device)
    while steps := pipe.recv():
        pipe.send(take(steps))


def synchronize(device: torch.device) -> None:
    """Waits until a GPU has done all it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def summarize(values: Sequence[float] | np.ndarray, digits: int = 3) -> dict[str, Any]:
    """Median and range of repeated measurements."""
    spread = [round(float(np.min(values)), digits), round(float(np.max(values)), digits)]
    return {"median": round(float(np.median(values)), digits), "range": spread}


def ratios(first: Sequence[float], second: Sequence[float]) -> np.ndarray:
    """How many times `second` the values of `first` are, round by round."""
    return np.divide(first, second)


def verdict(
    interval: Sequence[float], *, at_most: float | None = None, at_least: float = 0
) -> dict[str, Any]:
    """A limit or a goal, and whether it is met: by the whole of an interval or a range, or by none of it."""
    low, high = interval
    if at_most is None:
        limit, met, missed = {"at_least": at_least}, low >= at_least, high < at_least
    else:
        limit, met, missed = {"at_most": at_most}, high <= at_most, low > at_most
    return {**limit, "verdict": "met" if met else "missed" if missed else "unresolved"}


def matrix_rate(device: torch.device, precision: Precision, *, side: int) -> float:
    """Measures the FLOP/s of a product of two square matrices: the fastest of several tries."""
    a, b = (torch.rand(side, side, device=device).to(AUTOCAST_DTYPES.get(precision)) for _ in range(2))
    multiply = timed(lambda _: a @ b, device)
    multiply(1)  # the first product also loads the library
    taken: list[float] = []
    while (sum(taken) < _MEASURED_S or len(taken) < _TRIES) and sum(taken) < _LONGEST_S:
        taken.append(multiply(1)["wall"] / 1e3)
    return 2 * side**3 / min(taken)
