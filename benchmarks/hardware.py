"""What each pretraining preset needs: computed memory on one GPU and computed time. Nothing is trained.

    python benchmarks/hardware.py [--out FILE]

Memory is that of an eager step in bf16 with fused attention at ZeRO 0, counted as `--dry-run` counts it: weights,
gradients, moments, and what autograd keeps. Times are model FLOPs over the rates of `CARDS` and `CPU`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

# So that a checkout runs without being installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness.command import ROOT, make_parser, parse, publish, run
from benchmarks.harness.workloads import Workload, load
from mae_vit.training.engines.cost import kept_bytes

# Memory of a card in GB -> the largest micro-batch is to fit into this part of it, beside CUDA's context of a GiB.
SIZES, USABLE, CONTEXT_GIB = (12, 24, 40, 80), 0.92, 1.0
# Dense bf16 peak in TFLOP/s (data sheets).
CARDS = {"A10": 125, "A100": 312, "H100": 989}
# Width of the encoder -> the share of the peak that a compiled step reached on an H100 (docs/results/gpu/h100.md).
# Narrower networks are limited by the launch of kernels, so their time does not follow from FLOPs.
SHARES = {768: 0.28, 192: 0.11}
# FLOP/s of two cores with AVX2 in fp32: 250 images/s of 0.2115 GFLOP (docs/results/step_avx2.json).
CPU = 250 * 0.2115e9
COUNTED = (128, 256)


def describe(workload: Workload) -> dict[str, Any]:
    """The needs of a preset: parameters, FLOPs, memory, micro-batches by card, hours for a million images."""
    info, config = workload.info, workload.config
    kept = [
        kept_bytes(
            workload.objective,
            image_shape=(info.in_chans, *info.img_size),
            batch_size_per_device=size,
            precision="bf16",
            fused_attention=True,
            activation_checkpointing=config.train.activation_checkpointing,
            dtype=info.bands.torch_dtype,
        )
        for size in COUNTED
    ]
    costs = workload.costs
    per_image = (kept[1] - kept[0]) / (COUNTED[1] - COUNTED[0])
    # Weights, gradients and moments, and autocast's copies of weights.
    fixed = (
        2**30 * costs.least_gib(world_size=1, zero_stage=0, kept_bytes=0) + kept[0] - COUNTED[0] * per_image
    )
    fitting = {}
    for size in SIZES:
        room = (size * USABLE - CONTEXT_GIB) * 2**30 - fixed
        fits = int(room / per_image)
        most = min(1 << fits.bit_length() - 1 if fits > 0 else 0, config.train.effective_batch_size)
        fitting[f"gb_{size}"] = most or "-"
    gflop = costs.flops_per_image / 1e9
    share = next(
        (part for width, part in SHARES.items() if (getattr(info.geometry, "embed_dim", 0) or 0) >= width),
        None,
    )
    hours = {
        card: gflop * 1e15 / (peak * 1e12 * share) / 3600 if share else None for card, peak in CARDS.items()
    }
    return {
        "parameters": costs.parameters,
        "gflop": round(gflop, 3),
        "fixed_gib": round(fixed / 2**30, 2),
        "mib_an_image": round(per_image / 2**20, 2),
        **fitting,
        "cpu_h": _hours(gflop * 1e15 / CPU / 3600),
        **{card.lower(): _hours(time) for card, time in hours.items()},
    }


def _hours(time: float | None) -> str:
    if time is None:
        return ""
    if time >= 48:
        return f"{time / 24:,.0f} days"
    return f"{time:.1f} h" if time >= 1 else f"{60 * time:.2g} min"


def main() -> None:
    """Runs the command line."""
    parser = make_parser(__doc__)
    arguments = parse(parser)
    presets = {}
    for path in sorted((ROOT / "configs" / "pretrain").glob("*.yaml")):
        workload = load(path, [], batch_size=COUNTED[0], precision="bf16", threads=1)
        presets[path.stem] = describe(workload)
        print(path.stem, presets[path.stem], file=sys.stderr)
    publish({"benchmark": "hardware", "computed": True, "presets": presets}, arguments, threads=1)


if __name__ == "__main__":
    run(main)
