"""Forward + backward + AdamW of a pretraining step, against transformers' ViTMAE and the official MAE code.

Same model, batch, threads and precision (fp32, and bf16 where the device has it); peers in both of
their attention settings (eager, sdpa), and all also under torch.compile. On a CPU all have a run's setting
of glibc's memory; uncompiled peers also take part without it ("default memory"), as their own scripts run
them. Each contender runs in a process of its own, and they take turns, so that ratios hold
where absolute times drift. Objectives other than MAE have no peer. Prints JSON.

The official code takes part with `--official DIR`, a clone of github.com/facebookresearch/mae.

    python benchmarks/step.py [--config configs/mae_cifar_tiny.yaml] [--batch 128] [--device cpu]
        [--precision fp32 ...] [--rounds 7] [--steps 5] [--threads 2] [--contenders NAME ...]
        [--official DIR] [--peak-tflops X] [--out FILE] [KEY.PATH=VALUE ...]
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from importlib import metadata
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

# So that a checkout runs without being installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness.reports import add_out, head_of, publish
from benchmarks.harness.step_peers import OFFICIAL, TRANSFORMERS, check_clone, their_step
from benchmarks.harness.turns import Life, add_options, choose_device, paired, serve, summarize, take_turns
from benchmarks.harness.workloads import TINY, Workload, load
from mae_vit.core.errors import InputError
from mae_vit.training.engines.precision import choose_precision

OURS = ("ours", "ours compiled")
ATTENTIONS = ("eager", "sdpa")
COMPILED, DEFAULT_MEMORY = " compiled", " default memory"
PEERS = tuple(
    f"{library} {attention}{setting}"
    for library in (TRANSFORMERS, OFFICIAL)
    for setting in ("", COMPILED, DEFAULT_MEMORY)
    for attention in ATTENTIONS
)
# Label, ours, and the peers' setting.
PAIRS = (
    ("eager", "ours", ""),
    ("ours_compiled", "ours compiled", ""),
    ("both_compiled", "ours compiled", COMPILED),
    ("default_memory", "ours", DEFAULT_MEMORY),
)


def our_life(workload: Workload, pipe: Connection) -> None:
    """Ours, through the torch engine: uint8 images, masks drawn by key, as in a run."""
    serve(workload.steps(), pipe, workload.device())


def their_life(workload: Workload, name: str, official: Path | None, pipe: Connection) -> None:
    """A peer's."""
    torch.manual_seed(0)
    device = torch.device("cpu") if name.endswith(DEFAULT_MEMORY) else workload.device()
    torch.set_num_threads(workload.threads)
    serve(their_step(workload, name, device, official=official), pipe, device)


def contenders(workload: Workload, names: list[str], official: Path | None) -> dict[str, Life]:
    """Those that are asked for."""
    lives: dict[str, Life] = {}
    for name in names:
        chosen = workload.compile() if name.endswith(COMPILED) else workload
        ours = partial(our_life, chosen)
        lives[name] = ours if name in OURS else partial(their_life, chosen, name, official)
    return lives


def compare(times: dict[str, list[float]], workload: Workload, peak_tflops: float | None) -> dict[str, Any]:
    """Times and rates of each contender, and speed-ups over each library's fastest setting, round by round."""
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
    for library in (TRANSFORMERS, OFFICIAL):
        for label, ours, setting in PAIRS:
            there = [peer for peer in times if peer in {f"{library} {each}{setting}" for each in ATTENTIONS}]
            if ours in times and there:
                best = min(there, key=lambda peer: steps[peer]["median"])
                ratios = paired(times[best], times[ours], lambda theirs, our_time: theirs / our_time)
                found = results["speedup"].setdefault(library, {})
                found[label] = {"peer": best, **summarize(ratios)}
    return results


def choose(
    names: list[str] | None, objective: str, official: Path | None, *, device: str = "cpu"
) -> list[str]:
    """The contenders of an objective, or those of them that were named.

    Raises:
        InputError: for one that there is not, or for a folder without the official code.
    """
    if official is not None:
        check_clone(official)
        if objective != "mae":
            raise InputError(f"--official has no effect: the official code has no {objective}")
    there = [name for name in PEERS if device == "cpu" or not name.endswith(DEFAULT_MEMORY)]
    peers = [name for name in there if official or not name.startswith(OFFICIAL)]
    known = [*OURS, *(peers if objective == "mae" else ())]
    for name in names or ():
        if name in there and name not in peers:
            raise InputError(f'contender "{name}": needs --official DIR')
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
        help="one or both of them (fp32, and bf16 where the device has it)",
    )
    parser.add_argument(
        "--contenders", nargs="+", metavar="NAME", help=f"some of: {', '.join(OURS + PEERS)} (all)"
    )
    parser.add_argument(
        "--official",
        type=Path,
        metavar="DIR",
        help="clone of github.com/facebookresearch/mae: its code is run as a peer",
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
    automatic = choose_precision("auto", choose_device(arguments.device))
    results, names = {}, []
    try:
        for precision in arguments.precision or dict.fromkeys(("fp32", automatic.precision)):
            workload = load(
                arguments.config,
                arguments.overrides,
                batch_size=arguments.batch,
                precision=precision,
                threads=arguments.threads,
            )
            names = choose(
                arguments.contenders,
                workload.config.objective.name,
                arguments.official,
                device=arguments.device,
            )
            times = take_turns(
                contenders(workload, names, arguments.official),
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
        "auto_precision": str(automatic),
        "model_gflops_per_image": round(workload.flops_per_image / 1e9, 4),
        "peak_tflops": arguments.peak_tflops,
        "results": results,
        "transformers": metadata.version("transformers"),
        "official": head_of(arguments.official) if arguments.official else None,
    }
    publish(report, arguments.out, threads=arguments.threads)


if __name__ == "__main__":
    main()
