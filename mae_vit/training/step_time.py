"""Measures how long a step takes on this machine: times some real steps of the network before the run."""

from __future__ import annotations

import time
from typing import NamedTuple

import numpy as np
import torch

from mae_vit.config.plan import Plan
from mae_vit.data.training_data import TrainingData
from mae_vit.models.attention import GPU_KERNELS
from mae_vit.runtime.ranks import ALONE
from mae_vit.training.engines.base import Engine
from mae_vit.training.engines.build import build_engine
from mae_vit.training.engines.precision import Precision
from mae_vit.training.setup import TrainingSetup

# Approximate seconds for all tries, and for one micro-batch if it can be reduced: of processor time, of which other
# processes take none. Tries that these slow end after some seconds.
_ALL_S, _ONE_S, _PATIENCE_S = 1.0, 0.5, 5.0
_FEWEST_TRIES = 3
# Steps of six configs took 0.9 to 1.15 times as long as the tries, on an idle core and on a shared one.
_SLACK = 1.3
# Larger networks are not tried on a CPU: weights, gradients and moments take 16 bytes per parameter.
_MOST_PARAMETERS_ON_CPU = 150_000_000


class StepTime(NamedTuple):
    """Measured seconds of a step of one rank.

    Attributes:
        least_s: lower bound: processor time of the fastest try / `_SLACK`.
        most_s: upper bound: wall time of the slowest try x `_SLACK`.
        images: images of a try: a micro-batch or fewer.
    """

    least_s: float
    most_s: float
    tries: int
    images: int


def time_steps(setup: TrainingSetup, precision: Precision) -> StepTime | None:
    """Times steps for some seconds, on one rank and not compiled; None if the network is too large to try.

    `precision` replaces that of the config.
    """
    plan, data, device, task = setup.plan, setup.data, setup.device, setup.build()
    if device.type == "cpu" and sum(p.numel() for p in task.parameters()) > _MOST_PARAMETERS_ON_CPU:
        return None
    alone = {"engine": "torch", "zero_stage": 0, "compile": False}
    if device.type == "cpu" and setup.config.train.attention in GPU_KERNELS:
        alone["attention"] = "auto"  # a plan for a GPU may name a kernel that this machine lacks
    train = setup.config.train.model_copy(update={**alone, "precision": precision})
    config = setup.config.model_copy(update={"train": train})
    threads = torch.get_num_threads() if device.type == "cpu" else 1
    try:
        engine = build_engine(config, plan, task, ALONE, device, optimizer=setup.optimizer)
        parts, images = _try(engine, plan, data, unit=setup.unit)
    except torch.OutOfMemoryError:
        return None
    whole, tries = plan.batch_size_per_device / images, list[np.ndarray]()
    for reading, computing, updating in parts:
        micro_batch = whole * _micro_batch(reading, computing, data, threads)
        tries.append(plan.accumulation * micro_batch + updating)
    passed, had = np.transpose(tries)
    return StepTime(float(had.min()) / _SLACK, _SLACK * float(passed.max()), len(tries), images)


def _try(engine: Engine, plan: Plan, data: TrainingData, *, unit: int) -> tuple[list[np.ndarray], int]:
    """Returns the times of some tries, and the number of images of each.

    Times are seconds (3, 2): rows read, compute, update; columns wall time, processor time. A first try that takes a
    CPU longer than `_PATIENCE_S` is the only one.
    """
    device, position, begun = engine.device, 0, time.monotonic()
    # Of a GPU's work, processor time tells nothing.
    kind = 0 if device.type == "cuda" else 1

    def take(images: int) -> np.ndarray:
        nonlocal position
        times = [_clock(device)]
        batch = data.read_some(position, images)
        position += images
        times.append(_clock(device))
        engine.backward(engine.forward(batch.to(device)).loss)
        times.append(_clock(device))
        engine.step(plan.lr)
        return np.diff([*times, _clock(device)], axis=0)

    # Batch normalization needs at least two images.
    images = min(2 * unit, plan.batch_size_per_device)
    first = take(images)  # loads libraries, makes optimizer states
    if device.type == "cpu" and first[:2, kind].sum() > _PATIENCE_S:
        return [first], images
    # A step's fixed costs are those of a micro-batch: tries of few images would count them many times.
    while images < plan.batch_size_per_device and time.monotonic() < begun + _PATIENCE_S:
        # The first try of a size also allocates memory.
        had = take(images)[:2, kind].sum()
        fitting = int(images * min(8.0, _ONE_S / had)) // unit * unit
        if fitting <= images:
            break
        images = min(fitting, plan.batch_size_per_device)
    else:
        take(images)
    tries, had, begun = list[np.ndarray](), 0.0, time.monotonic()
    while not tries or (
        (had < _ALL_S or len(tries) < _FEWEST_TRIES) and time.monotonic() < begun + _PATIENCE_S
    ):
        tries.append(take(images))
        had += tries[-1][:, kind].sum()
    return tries, images


def _micro_batch(reading: np.ndarray, computing: np.ndarray, data: TrainingData, threads: int) -> np.ndarray:
    """Returns the time of a micro-batch, from the times of reading (one process) and computing (all threads)."""
    if not data.workers:
        return reading + computing
    # Workers read while threads compute, limited by the number of cores.
    shared = (reading + computing * threads) / data.cores
    return np.maximum(np.maximum(computing, reading / data.workers), shared)


def _clock(device: torch.device) -> tuple[float, float]:
    """Returns wall time and this thread's processor time; the thread takes part in all computing."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    now = time.perf_counter()
    return now, now if device.type == "cuda" else time.thread_time()
