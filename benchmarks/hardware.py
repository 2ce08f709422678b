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
from mae_vit.training.engines.cost import MetaStep

# Memory of a card in GB -> the largest micro-batch is to fit into this part of it, beside CUDA's context of a GiB.
SIZES, USABLE, CONTEXT_GIB = (12, 24, 40, 80), 0.92, 1.0
# Dense bf16 peak in FLOP/s (data sheets).
CARDS = {"a10": 125e12, "a100": 312e12, "h100": 989e12}
# Width of the encoder -> the share of the peak that a compiled step reached on an H100 (docs/results/gpu/h100.md).
# Narrower networks are limited by the launch of kernels, so they have no such time.
SHARES = {768: 0.28, 192: 0.11}
# FLOP/s of two cores with AVX2 in fp32: 250 images/s of 0.2115 GFLOP (docs/results/step_avx2.json).
CPU = 250 * 0.2115e9
COUNTED = (128, 256)


def describe(workload: Workload) -> dict[str, Any]:
    """The needs of a preset: parameters, FLOPs, memory, micro-batches by card, hours for a million images."""
    info, config = workload.info, workload.config
    shape, recomputed = (info.in_chans, *info.img_size), config.train.activation_checkpointing
    steps = [MetaStep(workload.objective, shape, size, recomputed) for size in COUNTED]
    kept = [step.kept_bytes("bf16", fused_attention=True) for step in steps]
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
        fitting[f"gb_{size}"] = f"{most:,}" if most else "none"
    flops = costs.flops_per_image
    width = getattr(info.geometry, "embed_dim", None) or 0
    share = next((part for least, part in SHARES.items() if width >= least), None)
    return {
        "parameters": costs.parameters,
        "gflop": round(flops / 1e9, 3),
        "fixed_gib": round(fixed / 2**30, 2),
        "mib_an_image": round(per_image / 2**20, 2),
        **fitting,
        "cpu": _time_of_a_million(flops, CPU),
        **({card: _time_of_a_million(flops, peak * share) for card, peak in CARDS.items()} if share else {}),
    }


def _time_of_a_million(flops: float, rate: float) -> str:
    hours = 1e6 * flops / rate / 3600
    if hours >= 48:
        return f"{hours / 24:,.0f} days"
    return f"{hours:.1f} h" if hours >= 1 else f"{60 * hours:.1f} min"


def main() -> None:
    """Runs the command line."""
    arguments = parse(make_parser(__doc__))
    presets = {}
    for path in sorted((ROOT / "configs" / "pretrain").glob("*.yaml")):
        workload = load(path, [], batch_size=COUNTED[0], precision="bf16", threads=1)
        presets[path.stem] = describe(workload)
        print(path.stem, presets[path.stem], file=sys.stderr)
    publish({"benchmark": "hardware", "computed": True, "presets": presets}, arguments, threads=1)


if __name__ == "__main__":
    run(main)
