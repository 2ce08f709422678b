"""How long a step takes on this machine: some real ones of a run's network, before it begins."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from mae_vit.config.plan import Plan
from mae_vit.config.schema import Config
from mae_vit.data.training_data import TrainingData
from mae_vit.objectives.objective import Task
from mae_vit.runtime.ranks import ALONE, Ranks
from mae_vit.training.engines.build import build_engine
from mae_vit.training.engines.precision import Precision
from mae_vit.training.optim.optimizers import OptimizerOptions

# Seconds that all tries take about, and those of a micro-batch where fewer images can be taken.
_ALL_S, _ONE_S = 2.0, 0.5
_FEWEST_TRIES = 3
# Steps of six configs took 0.9 to 1.15 times as long as the tries, on a quiet core and on one that others used too.
_SLACK = 1.3
# Larger networks are not tried on a CPU: weights, gradients and moments take 16 bytes for each.
_MOST_PARAMETERS_ON_CPU = 150_000_000


class StepTime(NamedTuple):
    """Seconds of a step of one rank, as tried.

    Attributes:
        alone_s: processor time of the fastest try, and some less: where nothing else runs.
        slowest_s: that passed in the slowest try, and some more.
        tries: how many there were.
        images: images of a try: those of a micro-batch, or fewer.
    """

    alone_s: float
    slowest_s: float
    tries: int
    images: int


def time_steps(
    config: Config,
    plan: Plan,
    build: Callable[[], Task],
    data: TrainingData,
    ranks: Ranks,
    device: torch.device,
    precision: Precision,
    *,
    unit: int,
    optimizer: OptimizerOptions | None = None,
) -> StepTime | None:
    """Takes steps for some seconds, on one rank and not compiled; None if the network is too large to try.

    `build` makes the network, of which the weights change. `precision` is that of the run, which the config may leave
    open; `unit` the images that a micro-batch has together. Without an `optimizer`, it is the config's.
    """
    task = build()
    if device.type == "cpu" and sum(p.numel() for p in task.parameters()) > _MOST_PARAMETERS_ON_CPU:
        return None
    alone = {"engine": "torch", "zero_stage": 0, "compile": False}
    config = config.model_copy(
        update={"train": config.train.model_copy(update={**alone, "precision": precision})}
    )
    threads = torch.get_num_threads() if device.type == "cpu" else 1
    try:
        engine = build_engine(config, plan, task, ALONE, device, optimizer=optimizer)
        position = 0

        def take(images: int) -> np.ndarray:
            """Seconds (3, 2): to read, to compute and to update; that passed, and that this process had of them."""
            nonlocal position
            times = [_clock(device)]
            batch = data.read_some(position, images)
            position += images
            times.append(_clock(device))
            engine.backward(engine.forward(batch.to(device)).loss)
            times.append(_clock(device))
            engine.step(plan.lr)
            return np.diff([*times, _clock(device)], axis=0)

        # At least two: batch normalization needs them.
        images, begun = min(2 * unit, plan.batch_size_per_device), time.monotonic()
        take(images)  # loads libraries, makes optimizer states
        while images < plan.batch_size_per_device and time.monotonic() < begun + _ALL_S:
            # The first of a size takes memory, too.
            seconds = take(images)[:2, 0].sum()
            fitting = int(images * min(8.0, _ONE_S / seconds)) // unit * unit
            if fitting <= images:
                break
            images = min(fitting, plan.batch_size_per_device)
        whole, tries = plan.batch_size_per_device / images, list[np.ndarray]()
        if time.monotonic() < begun + _ALL_S:
            take(images)
        while time.monotonic() < begun + _ALL_S or len(tries) < _FEWEST_TRIES:
            reading, computing, updating = take(images)
            micro_batch = whole * _micro_batch(reading, computing, data, threads)
            tries.append(plan.accumulation * micro_batch + updating)
            if time.monotonic() > begun + 3 * _ALL_S:
                break
    except torch.OutOfMemoryError:
        return None
    passed, had = np.transpose(tries)
    return StepTime(float(had.min()) / _SLACK, _SLACK * float(passed.max()), len(tries), images)


def _micro_batch(reading: np.ndarray, computing: np.ndarray, data: TrainingData, threads: int) -> np.ndarray:
    """Returns the time of a micro-batch, from that of one process that reads it and of all threads that compute."""
    if not data.workers:
        return reading + computing
    # Workers read while threads compute, as far as there are cores.
    shared = (reading + computing * threads) / data.cores
    return np.maximum(np.maximum(computing, reading / data.workers), shared)


def _clock(device: torch.device) -> tuple[float, float]:
    """Returns the time, and the time that a processor gave to this thread, which takes part in all computing."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    now = time.perf_counter()
    return now, now if device.type == "cuda" else time.thread_time()
