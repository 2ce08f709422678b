"""Where the time of a pretraining step goes: its ten largest costs, and the share of the machine's matrix rate.

PyTorch's profiler over some steps of `mae_cifar_tiny` and of ViT-B at 224 px (or of one
config), on the torch engine. The machine's rate is that of a 2048 x 2048 matrix product (8192 x 8192 on a
GPU) in the same precision, on the same threads, between the steps. Prints a table for each, then JSON.

    python benchmarks/profile_step.py [--config FILE] [--batch N] [--precision auto] [--steps 3]
        [--threads 1] [--device cpu] [--compile] [--out FILE] [KEY.PATH=VALUE ...]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

# So that a checkout runs without being installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness.matrix_rate import matrix_rate
from benchmarks.harness.reports import add_out, publish
from benchmarks.harness.turns import add_precision, choose_device, summarize, synchronize
from benchmarks.harness.workloads import BASE, TINY, Workload, load
from mae_vit.core.errors import InputError
from mae_vit.training.engines.precision import Precision, choose_precision

# Configs and batches that are profiled where none is named.
DEFAULTS = ((TINY, 128), (BASE, 4))
TOP = 10
# Side of the matrices whose product is a CPU's rate: of a large layer; the plan's are smaller, to be quick.
CPU_SIDE = 2048
PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")
# Names of the kernels that multiply matrices on a GPU hold one of these.
GPU_PRODUCTS = ("gemm", "cutlass", "flash", "fmha", "sm90_xmma", "nvjet")


@dataclass(frozen=True)
class Cost:
    """One kind of operation, itself without what it calls.

    Attributes:
        name: of the operation; of the kernel on a GPU.
        ms_per_step: of all its calls.
        calls_per_step: how many there are.
    """

    name: str
    ms_per_step: float
    calls_per_step: float


def find_costs(step: Callable[[int], None], steps: int, device: torch.device) -> list[Cost]:
    """Profiles some steps; all costs, largest first."""
    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities) as profiler:
        for number in range(steps):
            step(number)
        synchronize(device)
    costs = []
    for event in profiler.key_averages():
        micros = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        # On a GPU operations and ranges have the time of their kernels, which are listed themselves.
        covers = event.device_type == torch.autograd.DeviceType.CPU or event.is_user_annotation
        if micros and not (on_gpu and covers):
            costs.append(Cost(event.key, micros / steps / 1e3, event.count / steps))
    return sorted(costs, key=lambda cost: -cost.ms_per_step)


def count_flops(step: Callable[[int], None]) -> int:
    """FLOPs of the matrix products of a step, forward and backward, as they are computed."""
    with FlopCounterMode(display=False) as counter:
        step(0)
    return counter.get_total_flops()


def measure(
    step: Callable[[int], None], steps: int, precision: Precision, device: torch.device
) -> tuple[list[float], list[float]]:
    """Times steps, in seconds, and large matrix products, in FLOP/s, by turns."""
    side = CPU_SIDE if device.type == "cpu" else None
    matrix_rate(device, precision, side=side)
    taken, rates = [], []
    for number in range(steps):
        synchronize(device)
        begun = time.perf_counter()
        step(number)
        synchronize(device)
        taken.append(time.perf_counter() - begun)
        rates.append(matrix_rate(device, precision, side=side))
    return taken, rates


def examine(workload: Workload, steps: int, device: torch.device) -> dict[str, Any]:
    """All that is found out about a step."""
    run = workload.steps()
    # Counted on plain operations: compiled ones hide their products.
    flops = count_flops(workload.plain().steps() if workload.compiled else run)
    for number in range(2):
        run(number)
    taken, rates = measure(run, steps, workload.precision, device)
    costs = find_costs(run, steps, device)
    total = sum(cost.ms_per_step for cost in costs)
    in_products = sum(cost.ms_per_step for cost in costs if is_product(cost.name))
    shares = [flops / a / rate for a, rate in zip(taken, rates, strict=True)]
    share = summarize(shares)
    return {
        "ms_per_step": summarize([1e3 * seconds for seconds in taken], 2),
        "gflop_per_step": round(flops / 1e9, 3),
        "machine_gflop_per_s": summarize([rate / 1e9 for rate in rates], 1),
        "share_of_matrix_rate": share,
        "time_in_products": round(in_products / total, 3),
        "share_within_products": round(share["median"] * total / in_products, 3) if in_products else None,
        "top": [
            {
                "name": cost.name,
                "share": round(cost.ms_per_step / total, 4),
                "ms_per_step": round(cost.ms_per_step, 3),
                "calls_per_step": round(cost.calls_per_step, 1),
            }
            for cost in costs[:TOP]
        ],
    }


def is_product(name: str) -> bool:
    """Whether an operation or kernel multiplies matrices."""
    return name in PRODUCTS or any(part in name.lower() for part in GPU_PRODUCTS)


def show(title: str, profile: dict[str, Any]) -> None:
    """Prints a table for people."""
    print(f"{title}: {profile['ms_per_step']['median']} ms per step")
    print(f"  {'share':>6} {'ms/step':>9} {'calls':>7}  operation")
    for cost in profile["top"]:
        figures = f"{cost['share']:6.1%} {cost['ms_per_step']:9.2f} {cost['calls_per_step']:7.1f}"
        print(f"  {figures}  {cost['name'][:80]}")
    share, inside = profile["share_of_matrix_rate"]["median"], profile["share_within_products"]
    print(f"  {share:.1%} of the machine's {profile['machine_gflop_per_s']['median']:.0f} GFLOP/s;", end=" ")
    print(f"{profile['time_in_products']:.1%} of the time in matrix products, at {inside} of that rate\n")


def parse() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="one config (mae_cifar_tiny, mae_base)")
    parser.add_argument("--batch", type=int, metavar="N", help="images per step (128; 4 of mae_base)")
    add_precision(parser)
    parser.add_argument("--steps", type=int, default=3, metavar="N", help="steps that are profiled (3)")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="on a CPU (1)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where it runs (cpu)")
    parser.add_argument("--compile", action="store_true", help="profile the step under torch.compile")
    parser.add_argument("overrides", nargs="*", metavar="KEY.PATH=VALUE", help="change a value of the config")
    add_out(parser)
    return parser.parse_intermixed_args()


def main() -> None:
    """Profiles each config and prints what was found."""
    arguments = parse()
    device = choose_device(arguments.device)
    arguments.precision = choose_precision(arguments.precision, device).precision
    chosen = DEFAULTS if arguments.config is None else ((arguments.config, 128),)
    results = {}
    for config, batch in chosen:
        try:
            workload = load(
                config,
                arguments.overrides,
                batch_size=arguments.batch or batch,
                precision=arguments.precision,
                threads=arguments.threads,
            )
        except InputError as error:
            raise SystemExit(f"error: {error}") from None
        if arguments.compile:
            workload = workload.compile()
        profile = examine(workload, arguments.steps, device)
        show(f"{config.stem}, batch {workload.batch_size}, {workload.precision}", profile)
        results[config.stem] = {"batch": workload.batch_size, **profile}
    names = ("precision", "steps", "threads", "device", "compile", "overrides")
    options = {name: getattr(arguments, name) for name in names}
    publish(
        {"benchmark": "profile_step", **options, "results": results}, arguments.out, threads=arguments.threads
    )


if __name__ == "__main__":
    main()
