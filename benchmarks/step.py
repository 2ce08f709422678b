"""Forward + backward + AdamW of `mae_cifar_tiny`, against transformers' ViTMAE.

Same model, batch, threads and precision; transformers in both of its attention settings
(eager, sdpa), and both libraries also under torch.compile. Each contender runs in a
process of its own, as its users run it, and they take turns, so that ratios hold where
absolute times drift. Prints JSON.

    python benchmarks/step.py [--batch 128] [--rounds 7] [--steps 5] [--threads 2] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable
from importlib import metadata
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

# So that a checkout runs without being installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mae_vit.batch import Batch
from mae_vit.encoder import SIZES, ViTEncoder
from mae_vit.keyed import SampleKeys
from mae_vit.objectives.mae import MAEConfig
from mae_vit.training.distributed import Ranks, find_device
from mae_vit.training.engine import StepOptions, TorchEngine
from mae_vit.training.optimizers import OptimizerOptions
from mae_vit.training.run_folder import describe_environment

SIZE, PATCH, PIXELS = SIZES["tiny-cifar"], 4, 32
DECODER_WIDTH, DECODER_DEPTH, DECODER_HEADS = 96, 2, 4
OURS = ("ours", "ours compiled")
PEERS = ("transformers eager", "transformers sdpa", "transformers eager compiled")


def our_step(batch_size: int, precision: str, threads: int, compiled: bool = False) -> Callable[[int], None]:
    """Ours, through the torch engine: uint8 images, masks drawn by key, as in a run."""
    device = find_device(Ranks())
    torch.set_num_threads(threads)
    encoder = ViTEncoder(
        img_size=(PIXELS, PIXELS),
        patch_size=PATCH,
        embed_dim=SIZE.embed_dim,
        depth=SIZE.depth,
        num_heads=SIZE.num_heads,
    )
    config = MAEConfig(
        name="mae",
        decoder_embed_dim=DECODER_WIDTH,
        decoder_depth=DECODER_DEPTH,
        decoder_num_heads=DECODER_HEADS,
    )
    options = StepOptions(
        optimizer=OptimizerOptions("adamw", 0.05, {"betas": (0.9, 0.95), "eps": 1e-8}),
        clip_grad=None,
        precision=precision,  # type: ignore[arg-type]
        batch_size_per_device=batch_size,
        accumulation=1,
        compile=compiled,
    )
    engine = TorchEngine(config.build(encoder, mean=[0.5] * 3, std=[0.25] * 3), options, Ranks(), device)
    images = torch.randint(0, 256, (batch_size, 3, PIXELS, PIXELS), dtype=torch.uint8)
    labels = torch.zeros(batch_size, dtype=torch.int64)

    def step(number: int) -> None:
        index = torch.arange(batch_size) + number * batch_size
        engine.backward(engine.forward(Batch(images, labels, SampleKeys(0, 0, index))).loss)
        engine.step(1e-4)

    return step


def their_step(
    batch_size: int, precision: str, threads: int, attention: str, compiled: bool = False
) -> Callable[[int], None]:
    """ViTMAE of transformers with the same AdamW kernel; images arrive normalized, masks by its own noise."""
    from transformers import ViTMAEConfig, ViTMAEForPreTraining

    torch.set_num_threads(threads)
    config = ViTMAEConfig(
        hidden_size=SIZE.embed_dim,
        num_hidden_layers=SIZE.depth,
        num_attention_heads=SIZE.num_heads,
        intermediate_size=4 * SIZE.embed_dim,
        decoder_hidden_size=DECODER_WIDTH,
        decoder_num_hidden_layers=DECODER_DEPTH,
        decoder_num_attention_heads=DECODER_HEADS,
        decoder_intermediate_size=4 * DECODER_WIDTH,
        image_size=PIXELS,
        patch_size=PATCH,
        norm_pix_loss=True,
        layer_norm_eps=1e-6,
        attn_implementation=attention,
    )
    model = ViTMAEForPreTraining(config).train()
    if compiled:
        model.compile(dynamic=False)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.05, fused=True
    )
    images = torch.randn(batch_size, 3, PIXELS, PIXELS)

    def step(number: int) -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16"):
            loss = model(images).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def contend(name: str, pipe: Connection, batch_size: int, precision: str, threads: int) -> None:
    """The life of a contender: takes as many steps as it is told, answers in ms per step."""
    torch.manual_seed(0)
    compiled = name.endswith(" compiled")
    if name in OURS:
        step = our_step(batch_size, precision, threads, compiled)
    else:
        step = their_step(batch_size, precision, threads, name.split()[1], compiled)
    while steps := pipe.recv():
        begun = time.perf_counter()
        for number in range(steps):
            step(number)
        pipe.send((time.perf_counter() - begun) / steps * 1e3)


def measure(precision: str, arguments: argparse.Namespace) -> dict[str, list[float]]:
    """Times all contenders in turn, round after round: ms per step."""
    context = multiprocessing.get_context("spawn")
    pipes, processes = {}, []
    for name in (*OURS, *PEERS):
        pipes[name], theirs = context.Pipe()
        work = (name, theirs, arguments.batch, precision, arguments.threads)
        processes.append(context.Process(target=contend, args=work, daemon=True))
        processes[-1].start()
    times: dict[str, list[float]] = {name: [] for name in pipes}
    for round_number in range(arguments.rounds + 1):
        for name, pipe in pipes.items():
            pipe.send(arguments.steps)
            milliseconds = pipe.recv()
            if round_number:  # the first warms up
                times[name].append(milliseconds)
    for pipe in pipes.values():
        pipe.send(0)
    for process in processes:
        process.join()
    return times


def compare(times: dict[str, list[float]], batch_size: int) -> dict[str, Any]:
    """Medians, and speed-ups over the peer in its better attention setting, round by round."""
    medians = {name: statistics.median(values) for name, values in times.items()}
    best = min(PEERS[:2], key=medians.__getitem__)
    pairs = {"eager": ("ours", best), "ours_compiled": ("ours compiled", best)}
    pairs["both_compiled"] = ("ours compiled", PEERS[2])
    speedups = {}
    for label, (ours, peer) in pairs.items():
        ratios = [theirs / own for theirs, own in zip(times[peer], times[ours], strict=True)]
        spread = [round(min(ratios), 3), round(max(ratios), 3)]
        speedups[label] = {"median": round(statistics.median(ratios), 3), "range": spread}
    return {
        "ms_per_step": {name: round(ms, 1) for name, ms in medians.items()},
        "images_per_s": {name: round(batch_size / ms * 1e3) for name, ms in medians.items()},
        "best_peer": best,
        "speedup": speedups,
    }


def main() -> None:
    """Measures both precisions and prints the ratios."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch", type=int, default=128, metavar="N", help="images per step (128)")
    parser.add_argument(
        "--rounds", type=int, default=7, metavar="N", help="times that each contender's turn comes (7)"
    )
    parser.add_argument("--steps", type=int, default=5, metavar="N", help="steps in a turn (5)")
    parser.add_argument("--threads", type=int, default=2, metavar="N", help="threads of each contender (2)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the JSON here too")
    arguments = parser.parse_args()
    report = {
        "benchmark": "step",
        "model": "mae_cifar_tiny",
        "batch": arguments.batch,
        "threads": arguments.threads,
        "rounds": arguments.rounds,
        "results": {p: compare(measure(p, arguments), arguments.batch) for p in ("fp32", "bf16")},
        "transformers": metadata.version("transformers"),
        "environment": describe_environment(["benchmarks/step.py"], 1),
    }
    text = json.dumps(report, indent=2)
    print(text)
    if arguments.out:
        arguments.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
