"""Tries micro-batches of growing size: which fit into the memory, and how fast each is (`doctor --find-batch`)."""

from __future__ import annotations

import gc
import time
from dataclasses import replace

import torch
from torch import Tensor

from mae_vit.core.bands import Bands
from mae_vit.core.batch import Batch
from mae_vit.core.keyed_rng import SampleKeys
from mae_vit.pretraining.setup import Setup, count_classes, estimate_costs
from mae_vit.runtime.device import free_memory_gib
from mae_vit.runtime.ranks import Ranks
from mae_vit.training.engines.base import Engine
from mae_vit.training.engines.build import build_engine
from mae_vit.training.engines.compiling import choose_compiling

_TIMED_STEPS = 3
# The first one compiles and allocates; CUDA graphs are recorded in the second.
_WARM_UP_STEPS = 3
# An estimate above this share of the memory is not tried on a CPU, where too much ends other processes.
_CPU_SHARE = 0.8
# A larger size that is less than 3 % faster only costs memory.
_NEARLY = 0.97
_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "alloc_failed")


def print_trials(setup: Setup) -> tuple[bool, str]:
    """Trains a few steps at each size, in this process alone, until one does not fit; prints their speed.

    Uses the torch engine: DeepSpeed's keep their allocations. So optimizer states are whole, as at ZeRO 0.

    Returns:
        Whether any size fits, and which to use.
    """
    print("\nimages of a micro-batch   images/s   GiB (weights and states unsharded)")
    # As the plan has it: all views of an image, and all rows of a group, in one micro-batch.
    grouping = setup.config.objective.grouping
    rates: dict[int, float] = {}
    for size in candidates(
        setup.plan.effective_batch_size // setup.ranks.world_size,
        unit=grouping.unit if grouping else setup.config.data.repeats,
    ):
        rate, gib = _try(setup, size)
        print(f"{size:>23}   {'does not fit' if rate is None else f'{rate:,.0f}':>8}   {gib:.2f}", flush=True)
        if rate is None:
            break
        rates[size] = rate
    if not rates:
        return False, "none fits: a smaller model, or train.activation_checkpointing=true"
    return True, f"use train.batch_size_per_device={best_size(rates)}"


def candidates(images: int, *, unit: int = 1) -> list[int]:
    """Returns divisors of a rank's images of a step, about doubling, the last one `images`; `unit` divides each."""
    chosen: list[int] = []
    for size in range(unit, images + 1, unit):
        if images % size == 0 and (not chosen or size >= 2 * chosen[-1]):
            chosen.append(size)
    return [*chosen[:-1], images]


def best_size(rates: dict[int, float]) -> int:
    """Returns the smallest size that is nearly as fast as the fastest; rates: images per second by size."""
    return min(size for size, rate in rates.items() if rate >= _NEARLY * max(rates.values()))


def noise(bands: Bands, shape: tuple[int, int, int, int]) -> Tensor:
    """Draws raw images (B, C, H, W) as the loader hands them out: uint8, or values within the scale of each band."""
    if bands.photographs:
        return torch.randint(0, 256, shape, dtype=torch.uint8)
    low, high = (torch.tensor(ends).view(-1, 1, 1) for ends in (bands.low, bands.high))
    return (low + (high - low) * torch.rand(shape)).to(bands.torch_dtype)


def _try(setup: Setup, size: int) -> tuple[float | None, float]:
    """Returns images per second, None if a micro-batch does not fit, and GiB: the peak on a GPU, else an estimate."""
    config, device = setup.config, setup.device
    classes = count_classes(config, setup.data)
    costs = estimate_costs(config, setup.info, num_classes=classes, batch_size_per_device=size)
    gib = costs.memory_gib(world_size=1, zero_stage=0)
    if device.type == "cpu" and gib > _CPU_SHARE * free_memory_gib(setup.ranks, device)[0]:
        return None, gib
    plan = replace(setup.plan, batch_size_per_device=size, accumulation=1, effective_batch_size=size)
    train = config.train.model_copy(update={"engine": "torch", "zero_stage": 0})
    plain = config.model_copy(update={"train": train})
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    rate = None
    try:
        rate = _measure(setup, size, build_engine(plain, plan, setup.build(), Ranks(), device))
    except RuntimeError as error:
        # Raised by PyTorch, its libraries, or the CPU's allocator.
        if not any(words in str(error).lower() for words in _OUT_OF_MEMORY):
            raise
    if choose_compiling(plain, plan, device).on:
        # Else dynamo counts sizes as recompilations of one function, and runs eager from the ninth on.
        torch.compiler.reset()
    if device.type == "cuda":
        gib = torch.cuda.max_memory_allocated(device) / 2**30
        gc.collect()
        torch.cuda.empty_cache()
    return rate, gib


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
