"""Forward + backward + AdamW of `mae_cifar_tiny`, against transformers' ViTMAE.

Same model, batch, threads and precision; transformers in the better of its attention
settings (eager, sdpa); alternating in one process, so that ratios hold where absolute
times drift. Prints JSON.

    python benchmarks/step.py [--batch 128] [--rounds 7] [--threads 2] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import torch
from transformers import ViTMAEConfig, ViTMAEForPreTraining

from mae_vit.batch import Batch
from mae_vit.encoder import ViTEncoder
from mae_vit.keyed import SampleKeys
from mae_vit.objectives.mae import MAEConfig
from mae_vit.training.distributed import Ranks
from mae_vit.training.engine import StepOptions, TorchEngine
from mae_vit.training.run_folder import describe_environment

WIDTH, DEPTH, HEADS, PATCH, PIXELS = 128, 6, 4, 4, 32
DECODER_WIDTH, DECODER_DEPTH, DECODER_HEADS = 96, 2, 4


def our_step(batch_size: int, precision: str) -> Callable[[int], None]:
    """Ours, through the torch engine: uint8 images, masks drawn by key, as in a run."""
    torch.manual_seed(0)
    encoder = ViTEncoder(
        img_size=(PIXELS, PIXELS), patch_size=PATCH, embed_dim=WIDTH, depth=DEPTH, num_heads=HEADS
    )
    config = MAEConfig(
        name="mae",
        decoder_embed_dim=DECODER_WIDTH,
        decoder_depth=DECODER_DEPTH,
        decoder_num_heads=DECODER_HEADS,
    )
    options = StepOptions(
        betas=(0.9, 0.95),
        eps=1e-8,
        weight_decay=0.05,
        clip_grad=None,
        precision=precision,  # type: ignore[arg-type]
        batch_size_per_device=batch_size,
        accumulation=1,
    )
    objective = config.build(encoder, mean=[0.5] * 3, std=[0.25] * 3)
    engine = TorchEngine(objective, options, Ranks(), torch.device("cpu"))
    images = torch.randint(0, 256, (batch_size, 3, PIXELS, PIXELS), dtype=torch.uint8)
    labels = torch.zeros(batch_size, dtype=torch.int64)

    def step(number: int) -> None:
        index = torch.arange(batch_size) + number * batch_size
        engine.backward(engine.forward(Batch(images, labels, SampleKeys(0, 0, index))).loss)
        engine.step(1e-4)

    return step


def their_step(batch_size: int, precision: str, attention: str) -> Callable[[int], None]:
    """Transformers' ViTMAE with the same AdamW kernel; images arrive normalized, masks by its own noise."""
    torch.manual_seed(0)
    config = ViTMAEConfig(
        hidden_size=WIDTH,
        num_hidden_layers=DEPTH,
        num_attention_heads=HEADS,
        intermediate_size=4 * WIDTH,
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


def measure(contenders: dict[str, Callable[[int], None]], rounds: int, steps: int) -> dict[str, list[float]]:
    """Times `steps` steps of each contender in turn, `rounds` times: ms per step."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for round_number in range(rounds + 1):
        for name, step in contenders.items():
            begun = time.perf_counter()
            for number in range(steps):
                step(number)
            if round_number:  # the first warms up
                times[name].append((time.perf_counter() - begun) / steps * 1e3)
    return times


def main() -> None:
    """Measures both precisions and prints the ratios."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    results = {}
    for precision in ("fp32", "bf16"):
        times = measure(
            {
                "ours": our_step(arguments.batch, precision),
                "transformers eager": their_step(arguments.batch, precision, "eager"),
                "transformers sdpa": their_step(arguments.batch, precision, "sdpa"),
            },
            arguments.rounds,
            arguments.steps,
        )
        medians = {name: statistics.median(values) for name, values in times.items()}
        best = min(("transformers eager", "transformers sdpa"), key=medians.__getitem__)
        ratios = [theirs / ours for theirs, ours in zip(times[best], times["ours"], strict=True)]
        results[precision] = {
            "ms_per_step": medians,
            "images_per_s": {name: arguments.batch / ms * 1e3 for name, ms in medians.items()},
            "speedup_over_best": statistics.median(ratios),
            "speedup_range": [min(ratios), max(ratios)],
            "best_peer": best,
        }
    report = {
        "benchmark": "step",
        "model": "mae_cifar_tiny",
        "batch": arguments.batch,
        "threads": arguments.threads,
        "rounds": arguments.rounds,
        "results": results,
        "transformers": metadata.version("transformers"),
        "environment": describe_environment([], 1) | {"command": "benchmarks/step.py"},
        "machine": platform.machine(),
    }
    text = json.dumps(report, indent=2)
    print(text)
    if arguments.out:
        arguments.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
