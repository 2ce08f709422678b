"""Where the time of a pretraining step goes: its ten largest costs, and the share of the machine's matrix rate.

PyTorch's profiler over some steps of `mae_cifar_tiny` and of ViT-B at 224 px (or of one config), on the torch
engine. The machine's rate is that of a 2048 x 2048 matrix product (8192 x 8192 on a GPU) in the same precision, on
the same threads, between the steps.

    python benchmarks/profile_step.py [--config FILE --batch N] [--device cuda] [--compile] [--out FILE]
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

# So that a checkout runs without being installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness.command import make_parser, parse, publish, run
from benchmarks.harness.turns import matrix_rate, ratios, summarize, synchronize, timed
from benchmarks.harness.workloads import BASE, TINY, Workload, load_for

# Configs and batches that are profiled where none is named.
DEFAULTS = ((TINY, 128), (BASE, 4))
TOP = 10
# Sides of the matrices whose product is a device's rate: of a large layer on a CPU; on a GPU they fill it.
SIDES = {"cpu": 2048, "cuda": 8192}
PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")
# Names of the kernels that multiply matrices on a GPU hold one of these.
GPU_PRODUCTS = ("gemm", "cutlass", "flash", "fmha", "sm90_xmma", "nvjet")


def find_costs(step: Callable[[int], None], steps: int, device: torch.device) -> list[dict[str, Any]]:
    """Profiles some steps; operations (on a GPU kernels) without what they call, the largest first."""
    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities) as profiler:
        for number in range(steps):
            step(number)
        synchronize(device)
    taken = []
    for event in profiler.key_averages():
        micros = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        # On a GPU operations and ranges have the time of their kernels, which are listed themselves.
        covers = event.device_type == torch.autograd.DeviceType.CPU or event.is_user_annotation
        if micros and not (on_gpu and covers):
            taken.append((micros / steps / 1e3, event))
    total = sum(milliseconds for milliseconds, _ in taken)
    return [
        {
            "name": event.key,
            "share": milliseconds / total,
            "ms_per_step": round(milliseconds, 3),
            "calls_per_step": round(event.count / steps, 1),
        }
        for milliseconds, event in sorted(taken, key=lambda each: -each[0])
    ]


def examine(workload: Workload, steps: int, device: torch.device) -> dict[str, Any]:
    """All that is found out about a step."""
    run_step = workload.steps()
    # FLOPs of matrix products, counted on plain operations: compiled ones hide them.
    plain = replace(workload, compiled=False).steps() if workload.compiled else run_step
    with FlopCounterMode(display=False) as counter:
        plain(0)
    flops = counter.get_total_flops()
    side, taken, rates = SIDES[device.type], [], []
    take = timed(run_step, device)
    take(2)
    matrix_rate(device, workload.precision, side=side)
    for _ in range(steps):
        taken.append(take(1)["wall"])
        rates.append(matrix_rate(device, workload.precision, side=side))
    costs = find_costs(run_step, steps, device)
    in_products = sum(cost["share"] for cost in costs if is_product(cost["name"]))
    share = summarize(ratios([flops / milliseconds * 1e3 for milliseconds in taken], rates))
    return {
        "ms_per_step": summarize(taken, 2),
        "gflop_per_step": round(flops / 1e9, 3),
        "machine_gflop_per_s": summarize([rate / 1e9 for rate in rates], 1),
        "share_of_matrix_rate": share,
        "time_in_products": round(in_products, 3),
        "share_within_products": round(share["median"] / in_products, 3) if in_products else None,
        "top": [{**cost, "share": round(cost["share"], 4)} for cost in costs[:TOP]],
    }


def is_product(name: str) -> bool:
    """Whether an operation or kernel multiplies matrices."""
    return name in PRODUCTS or any(part in name.lower() for part in GPU_PRODUCTS)


def main() -> None:
    """Profiles each config and prints what was found."""
    parser = make_parser(__doc__, config=None, batch=None, precision="auto", device="cpu", steps=3, threads=1)
    parser.add_argument("--compile", action="store_true", help="profile the step under torch.compile")
    arguments = parse(parser)
    chosen = DEFAULTS if arguments.config is None else ((arguments.config, arguments.batch or 128),)
    results = {}
    for arguments.config, batch in chosen:
        arguments.batch = batch
        workload = replace(load_for(arguments), compiled=arguments.compile)
        profiled = examine(workload, arguments.steps, torch.device(arguments.device))
        results[arguments.config.stem] = {"batch": batch, **profiled}
    report = {"benchmark": "profile_step", "results": results}
    publish(report, arguments, "precision", "steps", "threads", "device", "compile", "overrides")


if __name__ == "__main__":
    run(main)
