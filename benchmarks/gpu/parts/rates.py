"""Steps of real models in bf16 on ready-made images, against transformers' ViTMAE: rates, memory, compile time.

Each contender has a process of its own and the same batch. All of a wave compile side by side; then each has the device
to itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.figures import Wave
from benchmarks.gpu.parts.sizes import BASE, HUGE, LARGE, SMALL, TINY, Model
from benchmarks.harness.turns import matrix_rate, summarize, timed
from benchmarks.step import their_step
from mae_vit.runtime.device import find_device
from mae_vit.runtime.ranks import Ranks
from mae_vit.training.engines.cost import peak_flops

OURS, COMPILED = "ours", "compiled"
CONTENDERS = (OURS, f"{OURS} {COMPILED}", "transformers sdpa", f"transformers sdpa {COMPILED}")
# Kernels of attention that `train.attention` names; those of a CPU at tiny size.
KERNELS, TINY_KERNELS = ("plain", "flash", "efficient"), ("flash",)
_ROUNDS = 5
_WARM_UP = 3


def waves(*, tiny: bool, scratch: Path) -> list[Wave]:
    """The machine's own rates, then the contenders: compiled ones first, should the time end."""
    models = (TINY,) if tiny else (SMALL, BASE, LARGE, HUGE)
    # A gibibyte: launching is nothing, and a cache holds none of it.
    sizes = {"side": 512, "copied": 1 << 22} if tiny else {"side": 8192, "copied": 1 << 30}
    kernels = [f"{OURS} {kernel} {COMPILED}" for kernel in (TINY_KERNELS if tiny else KERNELS)]
    eager, compiled = CONTENDERS[::2], CONTENDERS[1::2]
    return [
        [{"machine": partial(measure_machine, **sizes)}],
        *(
            [
                {f"{model.name} {name}": partial(measure_contender, model, name)}
                for name in names
                for model in models
            ]
            for names in ([*compiled, *kernels[:1]], eager, kernels[1:])
        ),
    ]


def measure_machine(*, side: int, copied: int) -> dict[str, Any]:
    """What the device can do: a large matrix product, a copy within it, and one from pinned memory, in bytes."""
    device = find_device(Ranks())
    host = torch.ones(copied, dtype=torch.uint8, pin_memory=device.type == "cuda")
    first, second = host.to(device), torch.empty(copied, dtype=torch.uint8, device=device)
    within = _seconds(lambda: second.copy_(first), device)
    pinned = _seconds(lambda: second.copy_(host, non_blocking=True), device)
    return {
        "matrix_tflop_s": round(matrix_rate(device, "bf16", side=side) / 1e12, 3),
        # Read and written.
        "copy_gb_s": round(2 * copied / within / 1e9, 2),
        "from_pinned_gb_s": round(copied / pinned / 1e9, 2),
    }


def _seconds(action: Callable[[], object], device: torch.device) -> float:
    take = timed(lambda _: action(), device)
    taken = [take(1)["wall"] / 1e3 for _ in range(_ROUNDS + 1)]
    return float(np.median(taken[1:]))


def measure_contender(model: Model, name: str) -> Iterator[dict[str, Any] | None]:
    """Takes a contender's first steps, then times turns of its steps between two waits for the device."""
    kernel = next((word for word in name.split() if word in KERNELS), "auto")
    workload = replace(model.workload(f"train.attention={kernel}"), compiled=name.endswith(COMPILED))
    device = workload.device()
    on_gpu = device.type == "cuda"
    step = workload.steps() if name.startswith(OURS) else their_step(workload, name, device)
    take = timed(step, device)
    # What is not compiled begins when it is alone: the first steps of all together would take much memory.
    first = take(1)["wall"] if workload.compiled else 0.0
    if on_gpu:
        torch.cuda.empty_cache()
    yield None
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    take(_WARM_UP)
    turns = [take(model.steps)["wall"] for _ in range(_ROUNDS)]
    milliseconds = float(np.median(turns))
    rate = workload.batch_size / milliseconds * 1e3
    flops, peak = workload.costs.flops_per_image * rate, peak_flops(device, "bf16")
    yield {
        "batch_size": workload.batch_size,
        "images_per_s": round(rate, 1),
        "ms_per_step": round(milliseconds, 2),
        "ms_range": summarize(turns, 2)["range"],
        "model_tflop_s": round(flops / 1e12, 3),
        "share_of_peak": round(flops / peak, 4) if peak else None,
        "peak_memory_gib": round(torch.cuda.max_memory_allocated(device) / 2**30, 2) if on_gpu else None,
        # An ordinary first step takes many times what later ones do: all above a second is the compiler's,
        # beside those of the others.
        **({"compile_s": round((first - milliseconds) / 1e3, 1)} if workload.compiled else {}),
    }
