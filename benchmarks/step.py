"""Forward + backward + AdamW of a pretraining step, against transformers' ViTMAE.

Same model, batch, threads and precision; transformers in both of its attention settings
(eager, sdpa), and both libraries also under torch.compile. Each contender runs in a
process of its own, as its users run it, and they take turns, so that ratios hold where
absolute times drift. Objectives other than MAE have no peer. Prints JSON.

    python benchmarks/step.py [--config configs/mae_cifar_tiny.yaml] [--batch 128] [--device cpu]
        [--precision fp32 bf16] [--rounds 7] [--steps 5] [--threads 2] [--contenders NAME ...]
        [--peak-tflops X] [--out FILE] [KEY.PATH=VALUE ...]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from importlib import metadata
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

# So that a checkout runs without being installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness.reports import add_out, publish
from benchmarks.harness.turns import Life, add_options, choose_device, paired, serve, summarize, take_turns
from benchmarks.harness.workloads import TINY, Workload, load
from mae_vit.core.errors import InputError
from mae_vit.objectives.mae import LAYER_NORM_EPS, MAEConfig

OURS = ("ours", "ours compiled")
PEERS = (
    "transformers eager",
    "transformers sdpa",
    "transformers eager compiled",
    "transformers sdpa compiled",
)
# Label, ours, and the peers of which the fastest counts.
PAIRS = (
    ("eager", "ours", PEERS[:2]),
    ("ours_compiled", "ours compiled", PEERS[:2]),
    ("both_compiled", "ours compiled", PEERS[2:]),
)


def our_life(workload: Workload, pipe: Connection) -> None:
    """Ours, through the torch engine: uint8 images, masks drawn by key, as in a run."""
    serve(workload.steps(), pipe, workload.device())


def their_life(workload: Workload, attention: str, pipe: Connection) -> None:
    """ViTMAE of transformers, as its users train it."""
    torch.manual_seed(0)
    torch.set_num_threads(workload.threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    serve(their_step(workload, attention, device), pipe, device)


def their_step(workload: Workload, attention: str, device: torch.device) -> Callable[[int], None]:
    """The same AdamW kernel; images arrive normalized, masks by its own noise."""
    from transformers import ViTMAEConfig, ViTMAEForPreTraining

    info, ours = workload.info, workload.config.objective
    assert isinstance(ours, MAEConfig)
    config = ViTMAEConfig(
        hidden_size=info.embed_dim,
        num_hidden_layers=info.depth,
        num_attention_heads=info.num_heads,
        intermediate_size=int(info.mlp_ratio * info.embed_dim),
        decoder_hidden_size=ours.decoder_embed_dim,
        decoder_num_hidden_layers=ours.decoder_depth,
        decoder_num_attention_heads=ours.decoder_num_heads,
        decoder_intermediate_size=4 * ours.decoder_embed_dim,
        image_size=info.img_size[0],
        patch_size=info.patch_size,
        num_channels=info.in_chans,
        mask_ratio=ours.mask_ratio,
        norm_pix_loss=ours.norm_pix_loss,
        layer_norm_eps=LAYER_NORM_EPS,
        attn_implementation=attention,
    )
    model = ViTMAEForPreTraining(config).to(device).train()
    if workload.compiled:
        model.compile(dynamic=False)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.05, fused=True
    )
    images = torch.randn(workload.batch_size, info.in_chans, *info.img_size, device=device)

    def step(number: int) -> None:
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=workload.precision == "bf16"):
            loss = model(images).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def contenders(workload: Workload, names: list[str]) -> dict[str, Life]:
    """Those that are asked for."""
    lives: dict[str, Life] = {}
    for name in names:
        chosen = workload.compile() if name.endswith(" compiled") else workload
        ours = partial(our_life, chosen)
        lives[name] = ours if name in OURS else partial(their_life, chosen, name.split()[1])
    return lives


def compare(times: dict[str, list[float]], workload: Workload, peak_tflops: float | None) -> dict[str, Any]:
    """Times and rates of each contender, and speed-ups over the fastest peer, round by round."""
    steps = {name: summarize(values, 2) for name, values in times.items()}
    images = {name: workload.batch_size / step["median"] * 1e3 for name, step in steps.items()}
    results: dict[str, Any] = {
        "ms_per_step": steps,
        "images_per_s": {name: round(rate) for name, rate in images.items()},
        "speedup": {},
    }
    if peak_tflops is not None:
        flops = workload.flops_per_image
        results["mfu"] = {name: round(rate * flops / peak_tflops / 1e12, 4) for name, rate in images.items()}
    for label, ours, peers in PAIRS:
        there = [peer for peer in peers if peer in times]
        if ours in times and there:
            best = min(there, key=lambda peer: steps[peer]["median"])
            ratios = paired(times[best], times[ours], lambda theirs, our_time: theirs / our_time)
            results["speedup"][label] = {"peer": best, **summarize(ratios)}
    return results


def choose(names: list[str] | None, objective: str) -> list[str]:
    """The contenders of an objective, or those of them that were named.

    Raises:
        InputError: for one that there is not.
    """
    known = [*OURS, *(PEERS if objective == "mae" else ())]
    for name in names or ():
        if name not in known:
            raise InputError(f'no contender "{name}" for {objective}: {", ".join(known)}')
    return names or known


def parse() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--config", type=Path, default=TINY, metavar="FILE", help="whose step (mae_cifar_tiny)"
    )
    parser.add_argument("--batch", type=int, default=128, metavar="N", help="images per step (128)")
    parser.add_argument(
        "--precision",
        nargs="+",
        choices=("fp32", "bf16"),
        default=["fp32", "bf16"],
        help="one or both of them (both)",
    )
    parser.add_argument(
        "--contenders", nargs="+", metavar="NAME", help=f"some of: {', '.join(OURS + PEERS)} (all)"
    )
    parser.add_argument(
        "--peak-tflops",
        type=float,
        metavar="X",
        help="the device's dense matrix rate: adds the share of it that model FLOPs reach",
    )
    parser.add_argument("overrides", nargs="*", metavar="KEY.PATH=VALUE", help="change a value of the config")
    add_options(parser, rounds=7, steps=5, threads=2)
    add_out(parser)
    return parser.parse_intermixed_args()


def main() -> None:
    """Measures the precisions asked for and prints the ratios."""
    arguments = parse()
    choose_device(arguments.device)
    results, names = {}, []
    try:
        for precision in arguments.precision:
            workload = load(
                arguments.config,
                arguments.overrides,
                batch_size=arguments.batch,
                precision=precision,
                threads=arguments.threads,
            )
            names = choose(arguments.contenders, workload.config.objective.name)
            times = take_turns(
                contenders(workload, names),
                rounds=arguments.rounds,
                steps=arguments.steps,
                clock=arguments.clock,
            )
            results[precision] = compare(times, workload, arguments.peak_tflops)
    except InputError as error:
        raise SystemExit(f"error: {error}") from None
    report = {
        "benchmark": "step",
        "config": arguments.config.stem,
        "overrides": arguments.overrides,
        "batch": arguments.batch,
        "device": arguments.device,
        "threads": arguments.threads,
        "rounds": arguments.rounds,
        "clock": arguments.clock,
        "model_gflops_per_image": round(workload.flops_per_image / 1e9, 4),
        "peak_tflops": arguments.peak_tflops,
        "results": results,
        "transformers": metadata.version("transformers"),
    }
    publish(report, arguments.out, threads=arguments.threads)


if __name__ == "__main__":
    main()
