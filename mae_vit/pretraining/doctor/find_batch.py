"""Tries micro-batches of growing size: which fit into the memory, and how fast each is."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mae_vit.core.bands import Bands, dtype_of_raw
from mae_vit.core.batch import Batch
from mae_vit.core.keyed_rng import SampleKeys
from mae_vit.pretraining.doctor.machine_checks import free_memory_gib
from mae_vit.pretraining.setup import Setup, count_classes, estimate_costs
from mae_vit.runtime.ranks import Ranks
from mae_vit.training.engines.base import Engine
from mae_vit.training.engines.build import build_engine
from mae_vit.training.engines.compiling import choose_compiling

_TIMED_STEPS = 3
# The first one compiles and allocates; CUDA graphs are recorded in the second.
_WARM_UP_STEPS = 3
# An estimate above this is not tried on a CPU, where too much memory ends other processes.
_CPU_SHARE = 0.8
_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "alloc_failed")


@dataclass(frozen=True)
class Trial:
    """One size.

    Attributes:
        batch_size_per_device: images of a micro-batch.
        images_per_s: of steps on images that are there already; None if it did not fit.
        gib: that a rank takes: measured at its peak on a GPU, estimated on a CPU.
    """

    batch_size_per_device: int
    images_per_s: float | None
    gib: float


def find_batch(setup: Setup) -> Iterator[Trial]:
    """Trains a few steps at each size, in this process alone; ends with the first that does not fit.

    Uses the torch engine: DeepSpeed's keep their allocations. So optimizer states are
    whole, as at ZeRO 0.

    Yields:
        Trials, of ascending size: the divisors of a rank's share of the batch, about doubling.
    """
    share = setup.plan.effective_batch_size // setup.ranks.world_size
    # As the plan has it: all views of an image, and all rows of a group, in one micro-batch.
    grouping = setup.config.objective.grouping
    unit = grouping.unit if grouping else setup.config.data.repeats
    for size in candidates(share, unit=unit):
        trial = _try(setup, size)
        yield trial
        if trial.images_per_s is None:
            return


def candidates(share: int, *, unit: int = 1) -> list[int]:
    """Returns divisors of a rank's images of a step, each at least twice the one before; the share itself at last.

    Args:
        share: images.
        unit: divides each divisor.
    """
    divisors = [d for d in range(unit, share + 1, unit) if share % d == 0]
    chosen: list[int] = []
    for divisor in divisors:
        if not chosen or divisor >= 2 * chosen[-1]:
            chosen.append(divisor)
    if chosen and chosen[-1] != share:
        chosen[-1] = share
    return chosen


def best_of(trials: list[Trial]) -> Trial | None:
    """Returns the smallest that is within 3 % of the fastest: a larger one only costs memory."""
    fitting = [(trial.images_per_s, trial) for trial in trials if trial.images_per_s is not None]
    if not fitting:
        return None
    fastest = max(rate for rate, _ in fitting)
    return next(trial for rate, trial in fitting if rate >= 0.97 * fastest)


def _try(setup: Setup, size: int) -> Trial:
    config, device = setup.config, setup.device
    classes = count_classes(config, setup.data)
    costs = estimate_costs(config, setup.info, num_classes=classes, batch_size_per_device=size)
    gib = costs.memory_gib(world_size=1, zero_stage=0)
    if device.type == "cpu" and gib > _CPU_SHARE * free_memory_gib(setup.ranks, device)[0]:
        return Trial(size, None, gib)
    plan = replace(setup.plan, batch_size_per_device=size, accumulation=1, effective_batch_size=size)
    plain = config.model_copy(
        update={
            "train": config.train.model_copy(
                update={"engine": "torch", "zero_stage": 0, "compress_gradients": "none"}
            )
        }
    )
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    rate = None
    try:
        rate = _measure(setup, size, build_engine(plain, plan, setup.build(), Ranks(), device))
    except RuntimeError as error:
        # Of PyTorch, its libraries, or the CPU's allocator.
        if not any(words in str(error).lower() for words in _OUT_OF_MEMORY):
            raise
    if choose_compiling(plain, plan, device).on:
        # Else dynamo, which counts sizes as recompilations of one function, runs eager from the ninth on.
        torch.compiler.reset()
    if device.type == "cuda":
        gib = torch.cuda.max_memory_allocated(device) / 2**30
        gc.collect()
        torch.cuda.empty_cache()
    return Trial(size, rate, gib)


def noise(bands: Bands | None, shape: tuple[int, int, int, int]) -> Tensor:
    """Draws raw images (B, C, H, W) as the loader hands them out: uint8, or values within the scale of each band."""
    if bands is None:
        return torch.randint(0, 256, shape, dtype=torch.uint8)
    low, high = (torch.tensor(ends).view(-1, 1, 1) for ends in (bands.low, bands.high))
    return (low + (high - low) * torch.rand(shape)).to(dtype_of_raw(bands))


def _measure(setup: Setup, size: int, engine: Engine) -> float:
    info, device = setup.info, setup.device
    images = noise(info.bands, (size, info.in_chans, *info.img_size))
    labels = torch.zeros(size, dtype=torch.int64)
    batch = Batch(images, labels, SampleKeys(0, 0, torch.arange(size))).to(device)
    begun = 0.0
    for step in range(_TIMED_STEPS + _WARM_UP_STEPS):
        if step == _WARM_UP_STEPS:
            _wait(device)
            begun = time.perf_counter()
        engine.backward(engine.forward(batch).loss)
        engine.step(setup.plan.lr)
    _wait(device)
    return _TIMED_STEPS * size / (time.perf_counter() - begun)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
