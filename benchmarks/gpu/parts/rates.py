"""Steps of real models in bf16 on ready-made images, against transformers' ViTMAE: rates, memory, compile time.

Each contender has the device to itself, in a process of its own, and the same batch. One that does
not fit is measured at half the batch, and says so.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from benchmarks.gpu.jobs import Emit, Job
from benchmarks.gpu.parts.sizes import LAUNCHED, PRECISION, SMALL, Model, models
from benchmarks.harness.matrix_rate import matrix_rate
from benchmarks.harness.step_peers import their_step
from benchmarks.harness.turns import summarize, synchronize
from benchmarks.harness.workloads import Workload
from mae_vit.runtime.device import find_device
from mae_vit.runtime.ranks import Ranks
from mae_vit.training.engines.peak_rates import peak_flops

T = TypeVar("T")
MACHINE = "machine"
OURS, COMPILED = "ours", "compiled"
# `train.compile=reduce-overhead`: of models whose steps are short.
GRAPHS = f"{OURS} reduce-overhead"
CONTENDERS = (OURS, f"{OURS} {COMPILED}", "transformers sdpa", f"transformers sdpa {COMPILED}")
_ROUNDS = 5
_WARM_UP = 3
# Large enough that launching is nothing and a cache holds none of it.
_COPIED_BYTES = 1 << 30


def jobs(*, tiny: bool, scratch: Path) -> list[Job]:
    """The machine's own rates, then the contenders: ours first, should the time end."""
    pairs = [(model, name) for name in CONTENDERS[:2] for model in models(tiny=tiny)]
    if not tiny:
        pairs += [(LAUNCHED, CONTENDERS[0]), (LAUNCHED, CONTENDERS[1]), (LAUNCHED, GRAPHS), (SMALL, GRAPHS)]
    pairs += [(model, name) for name in CONTENDERS[2:] for model in models(tiny=tiny)]
    return [
        Job(MACHINE, (MACHINE,), _Machine(tiny)),
        *(
            Job(key := f"{model.name} {name}", (key,), _Contender(model, name), limit_s=200)
            for model, name in pairs
        ),
    ]


@dataclass(frozen=True)
class _Machine:
    tiny: bool

    def __call__(self, wanted: frozenset[str], emit: Emit) -> None:
        emit(MACHINE, measure_machine(find_device(Ranks()), copied=1 << 22 if self.tiny else _COPIED_BYTES))


def measure_machine(device: torch.device, *, copied: int) -> dict[str, Any]:
    """What the device can do: a large matrix product, a copy within it, and one from pinned memory."""
    on_gpu = device.type == "cuda"
    host = torch.ones(copied, dtype=torch.uint8, pin_memory=on_gpu)
    first, second = host.to(device), torch.empty(copied, dtype=torch.uint8, device=device)
    return {
        "matrix_tflop_s": round(matrix_rate(device, PRECISION) / 1e12, 3),
        # Read and written.
        "copy_gb_s": round(2 * copied / _seconds(lambda: second.copy_(first), device) / 1e9, 2),
        "from_pinned_gb_s": round(
            copied / _seconds(lambda: second.copy_(host, non_blocking=True), device) / 1e9, 2
        ),
    }


def _seconds(action: Callable[[], object], device: torch.device) -> float:
    taken = []
    for _ in range(_ROUNDS + 1):
        synchronize(device)
        begun = time.perf_counter()
        action()
        synchronize(device)
        taken.append(time.perf_counter() - begun)
    return statistics.median(taken[1:])


@dataclass(frozen=True)
class _Contender:
    model: Model
    name: str

    def __call__(self, wanted: frozenset[str], emit: Emit) -> None:
        def measure(batch_size: int) -> dict[str, Any]:
            workload = self.model.workload(batch_size=batch_size)
            if self.name.endswith(COMPILED) or self.name == GRAPHS:
                workload = workload.compile(cuda_graphs=self.name == GRAPHS)
            return measure_rate(workload, self.name, self.model.steps)

        batch_size, values = largest_that_fits(self.model.batch_size, measure)
        halved = {} if batch_size == self.model.batch_size else {"out_of_memory_at": 2 * batch_size}
        emit(f"{self.model.name} {self.name}", {"batch_size": batch_size, **halved, **values})


def largest_that_fits(batch_size: int, measure: Callable[[int], T]) -> tuple[int, T]:
    """Measures at half the batch, and half of that, for as long as the device's memory is too small.

    Raises:
        torch.OutOfMemoryError: if not even one image fits.
    """
    while True:
        try:
            return batch_size, measure(batch_size)
        except torch.OutOfMemoryError:
            if batch_size == 1:
                raise
        # Here the error, and the tensors in its frames, are gone.
        batch_size //= 2
        gc.collect()
        if torch.cuda.is_available():
            torch.compiler.reset()
            torch.cuda.empty_cache()


def measure_rate(workload: Workload, name: str, steps: int) -> dict[str, Any]:
    """Times turns of a contender's steps between two waits for the device."""
    device = workload.device()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    step = workload.steps() if name.startswith(OURS) else their_step(workload, name, device)
    synchronize(device)
    begun = time.perf_counter()
    step(0)
    synchronize(device)
    first = time.perf_counter() - begun
    done, turns = 1, []
    for number in range(_ROUNDS + 1):
        turn = steps if number else _WARM_UP
        begun = time.perf_counter()
        for _ in range(turn):
            step(done)
            done += 1
        synchronize(device)
        turns.append((time.perf_counter() - begun) / turn)
    seconds = statistics.median(turns[1:])
    rate, peak = workload.batch_size / seconds, peak_flops(device, workload.precision)
    # An ordinary first step takes many times what later ones do: all above a second is the compiler's.
    compile_s = {"compile_s": round(first - seconds, 1)} if workload.compiled else {}
    memory = torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else None
    return {
        "images_per_s": round(rate, 1),
        "ms_per_step": round(seconds * 1e3, 2),
        "ms_range": summarize([1e3 * turn for turn in turns[1:]], 2)["range"],
        "model_tflop_s": round(rate * workload.flops_per_image / 1e12, 3),
        "share_of_peak": round(rate * workload.flops_per_image / peak, 4) if peak else None,
        "peak_memory_gib": round(memory, 2) if memory is not None else None,
        **compile_s,
    }
