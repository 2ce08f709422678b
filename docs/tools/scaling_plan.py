"""The plan of docs/scaling.md for large pretraining, from measured, computed and assumed numbers.

    python docs/tools/scaling_plan.py                          # prints its tables
    python docs/tools/scaling_plan.py --mfu 0.5 --cores-per-gpu 12 --full-size 700

Rates of a core are read from docs/results/loader.json (`benchmarks/loader.py`). FLOPs and states are those that
`--dry-run` prints, counted without computing anything. `docs/tools/tables.py` puts the tables into the page.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cache
from math import sqrt
from pathlib import Path

# So that a checkout runs without being installed, also if this file is imported.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from page_tables.files import ROOT, results, table

from mae_vit.config.geometry import resolve_encoder
from mae_vit.config.load import load_config
from mae_vit.data.batches.loader import auto_workers
from mae_vit.data.shards.index_rows import ROW
from mae_vit.models.encoder_file import EncoderInfo
from mae_vit.objectives.pretrain_config import PretrainConfig
from mae_vit.pretraining.setup import build_objective, estimate_costs
from mae_vit.training.engines.cost import Estimate, kept_bytes

MODELS = {"ViT-L/16": "mae_large", "ViT-H/14": "mae_huge"}
GPUS = (8, 64, 512)
_IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
# Bytes that each rank sends around a ring for every parameter of a step, in bf16, by ZeRO stage: float32 gradients
# twice around (ZeRO 0), and float32 weights once (1, 2); at ZeRO 3 weights once and gradients once, as long as it
# keeps what it has gathered until the backward pass.
# Counted on two ranks (tests/unit/training/engines/test_traffic.py).
_WIRE_BYTES = {0: 8.0, 1: 12.0, 2: 12.0, 3: 8.0}


def _measured_rate(row: str) -> float:
    rate: float = results("loader.json")[row]["images_per_s"]["ours"]
    return rate


@dataclass(frozen=True)
class Inputs:
    """What a reader puts own numbers in for; each is an option of the command line.

    Attributes:
        mfu: share of `tflops` that the model's FLOPs (3 x forward) reach. Assumed: we measured 0.30 of
            ViT-B/16 (results/gpu/rates.jsonl), and no larger model.
        tflops: dense bf16 of a GPU by its data sheet: H200.
        gpus_per_node: of a node.
        cores_per_gpu: of a node, for each of its GPUs. Assumed.
        full_size: images/s of one core, decode and crop of full-size JPEGs. Measured (loader.json).
        small_256: the same, of shards prepared with --resize 256 --quality 90. Measured (loader.json).
        repeated: crops/s of one core, full-size, four crops of each decoded image. Measured (loader.json).
        network_gb_s: of each GPU's network card. Assumed: 400 Gb/s, of which 80 %. A ring crosses the border of a node
            once: its GPUs send through all cards of the node together.
        host_gb_s: from a GPU to its host, for a save. Assumed.
        disk_gb_s: at which rank 0 writes a checkpoint. Assumed: a parallel file system.
        gpu_hours_per_failure: 50,700; Llama 3's 419 unexpected interruptions of 16,384 GPUs in 54 days.
    """

    mfu: float = 0.30
    tflops: float = 989.0
    gpus_per_node: int = 8
    cores_per_gpu: int = 16
    full_size: float = _measured_rate("full")
    small_256: float = _measured_rate("short256")
    repeated: float = _measured_rate("repeats4")
    network_gb_s: float = 40.0
    host_gb_s: float = 10.0
    disk_gb_s: float = 2.0
    gpu_hours_per_failure: float = 50_700.0


@dataclass(frozen=True)
class Data:
    """A data set and how long it is trained on.

    Attributes:
        images: of it.
        epochs: over it.
    """

    images: float
    epochs: float


DATA = {"ImageNet-21k": Data(14.2e6, 100), "a billion images": Data(1e9, 1)}
# Name, option that holds the rate of a core (None where it is not measured), KB of an image.
SHARDS = (
    ("full-size", "full_size", 110),
    ("384 px, quality 90", None, 96),
    ("256 px, quality 90", "small_256", 30),
)


@cache
def costs_of(config_name: str) -> Estimate:
    """Parameters, FLOPs and activations of a config's objective, as `--dry-run` counts them."""
    config, info = _resolved(config_name)
    return estimate_costs(config, info, num_classes=0, batch_size_per_device=1)


def _resolved(config_name: str) -> tuple[PretrainConfig, EncoderInfo]:
    config = load_config(PretrainConfig, ROOT / "configs" / f"{config_name}.yaml", [])
    mean, std = _IMAGENET
    return config, resolve_encoder(config.model, mean=mean, std=std, objective=config.objective.name)


@cache
def kept_of(config_name: str, *, recomputed: bool) -> tuple[int, int]:
    """Bytes that autograd keeps on a GPU in bf16: of each image, and of autocast's copies of the weights."""
    config, info = _resolved(config_name)
    one, two = (
        kept_bytes(
            lambda: build_objective(config, info, num_classes=0),
            image_shape=(info.in_chans, *info.img_size),
            batch_size_per_device=size,
            precision="bf16",
            fused_attention=True,
            activation_checkpointing=recomputed,
        )
        for size in (1, 2)
    )
    return two - one, 2 * one - two


def images_per_s(costs: Estimate, inputs: Inputs) -> float:
    """Images that one GPU trains on in a second."""
    return inputs.mfu * inputs.tflops * 1e12 / costs.flops_per_image


def batch_of(gpus: int) -> int:
    """Images of a step: MAE's 4096, and no fewer than 32 for each GPU."""
    return max(4096, 32 * gpus)


def rates(inputs: Inputs) -> str:
    """What one image costs, and what one GPU does."""
    rows = []
    for name, config in MODELS.items():
        costs = costs_of(config)
        rows.append(
            [
                name,
                f"{costs.encoder_parameters / 1e6:.0f} M, {costs.parameters / 1e6:.0f} M with the decoder",
                f"{costs.flops_per_image / 1e9:.0f} GFLOP",
                f"{images_per_s(costs, inputs):,.0f}",
                *(
                    f"{kept_of(config, recomputed=recomputed)[0] / 1e6:.0f} MB"
                    for recomputed in (False, True)
                ),
            ]
        )
    rate = f"images/s per GPU at {inputs.mfu:.0%} of {inputs.tflops:g} TFLOP/s (assumed)"
    head = ["model", "parameters", "an image, 3 x forward", rate, "activations of an image", "recomputed"]
    return table(head, rows)


def _time(seconds: float) -> str:
    """In days, below one in hours."""
    return f"{seconds / 86400:.1f} days" if seconds >= 86400 else f"{seconds / 3600:.1f} hours"


def runs(inputs: Inputs) -> str:
    """How long the runs take."""
    rows = []
    for name, config in MODELS.items():
        rate = images_per_s(costs_of(config), inputs)
        for data_name, data in DATA.items():
            seconds = data.images * data.epochs / rate
            times = [_time(seconds / gpus) for gpus in GPUS]
            rows.append([name, data_name, f"{data.epochs:g}", f"{seconds / 3600:,.0f}", *times])
    nodes = [f"on {gpus} GPUs ({-(-gpus // inputs.gpus_per_node)} nodes)" for gpus in GPUS]
    return table(["model", "data", "epochs (assumed)", "GPU-hours", *nodes], rows)


def cores(inputs: Inputs) -> str:
    """Cores that decode for one GPU."""
    rows, workers = [], auto_workers(inputs.cores_per_gpu, on_gpu=True)
    for label, rate in (
        *((name, getattr(inputs, of)) for name, of, _ in SHARDS if of),
        ("full-size, 4 crops of each", inputs.repeated),
    ):
        needed = [images_per_s(costs_of(config), inputs) / rate for config in MODELS.values()]
        fits = "yes" if max(needed) <= workers else "no"
        rows.append([label, f"{rate:,.0f}", *(f"{number:.1f}" for number in needed), fits])
    head = ["shards", "images/s of one core", *(f"cores per GPU, {name}" for name in MODELS)]
    return table([*head, f"fits the {workers} workers of {inputs.cores_per_gpu} cores per GPU"], rows)


def storage(inputs: Inputs) -> str:
    """What the data take, and how fast they are read."""
    fastest = max(images_per_s(costs_of(config), inputs) for config in MODELS.values())
    rows = []
    for label, _, kilobytes in SHARDS:
        sizes = [f"{data.images * kilobytes / 1e9:,.1f} TB" for data in DATA.values()]
        shards = [f"{-(-data.images * kilobytes * 1e3 // 2**28):,.0f}" for data in DATA.values()]
        reading = [f"{fastest * gpus * kilobytes / 1e6:,.2f}" for gpus in GPUS]
        rows.append([label, f"{kilobytes} KB", *sizes, " / ".join(shards), *reading])
    index = [f"{data.images * ROW.itemsize / 1e9:.1f} GB" for data in DATA.values()]
    rows.append(["index", f"{ROW.itemsize} B", *index, "", *[""] * len(GPUS)])
    head = ["shards", "an image", *DATA, "shards of 256 MiB (the default)"]
    return table([*head, *(f"GB/s on {gpus} GPUs, ViT-L/16" for gpus in GPUS)], rows)


def steps(inputs: Inputs) -> str:
    """Computing against sending, step by step."""
    rows = []
    for name, config in MODELS.items():
        costs = costs_of(config)
        for gpus in GPUS:
            batch = batch_of(gpus)
            computing = batch / gpus / images_per_s(costs, inputs)
            sent = {stage: each * costs.parameters * (gpus - 1) / gpus for stage, each in _WIRE_BYTES.items()}
            # Each of a node's GPUs sends that much to its neighbor; over the border, through all of the node's cards.
            bandwidth = inputs.network_gb_s * inputs.gpus_per_node * 1e9
            shares = [f"{sent[stage] / bandwidth / computing:.0%}" for stage in (0, 1)]
            sent_gb = [f"{sent[stage] / 1e9:.1f}" for stage in (0, 1, 3)]
            where = ["within the node"] * 2 if gpus <= inputs.gpus_per_node else shares
            rows.append(
                [name, gpus, f"{batch:,}", batch // gpus, f"{computing * 1e3:,.0f} ms", *sent_gb, *where]
            )
    head = ["model", "GPUs", "batch", "per GPU", "computing a step"]
    head += ["GB sent per GPU and step, ZeRO 0", "ZeRO 1, 2", "ZeRO 3"]
    head += [f"sending at ZeRO 0 and {inputs.network_gb_s:g} GB/s a card, of computing", "at ZeRO 1, 2"]
    return table(head, rows)


def states(inputs: Inputs) -> str:
    """Memory of the training state on one GPU."""
    rows = []
    for name, config in MODELS.items():
        costs = replace(costs_of(config), activation_bytes=0)
        copies = [f"{kept_of(config, recomputed=on)[1] / 2**30:.1f}" for on in (False, True)]
        for stage in _WIRE_BYTES:
            each = [f"{costs.memory_gib(world_size=gpus, zero_stage=stage):.1f}" for gpus in GPUS]
            rows.append([name, stage, *each, *copies])
    head = ["model", "ZeRO", *(f"GiB per GPU of {gpus}" for gpus in GPUS)]
    return table([*head, "and bf16 copies of the weights, GiB", "recomputed"], rows)


def saves(inputs: Inputs) -> str:
    """Size, stall and interval of checkpoints."""
    rows = []
    for name, config in MODELS.items():
        size = costs_of(config).checkpoint_bytes
        stall, write = size / inputs.host_gb_s / 1e9, size / inputs.disk_gb_s / 1e9
        for gpus in GPUS:
            between = inputs.gpu_hours_per_failure / gpus * 3600
            # Daly 2006: what saving and what repeating costs are least together.
            interval = max(sqrt(2 * stall * between), write)
            lost = stall / interval + interval / 2 / between
            rows.append(
                [
                    name,
                    gpus,
                    f"{size / 1e9:.1f} GB",
                    f"{stall:.1f} s",
                    f"{write:.0f} s",
                    f"{between / 86400:.3g} days",
                    f"{interval / 60:,.0f} min",
                    f"{lost:.2%}",
                ]
            )
    head = ["model", "GPUs", "checkpoint", "stall", "write behind it", "between failures", "save every"]
    return table([*head, "lost to saves and failures"], rows)


TABLES: dict[str, Callable[[Inputs], str]] = {
    "rates": rates,
    "runs": runs,
    "cores": cores,
    "storage": storage,
    "steps": steps,
    "states": states,
    "saves": saves,
}


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for field in fields(Inputs):
        kind = type(field.default)
        parser.add_argument(
            f"--{field.name.replace('_', '-')}", type=kind, default=field.default, help=f"({field.default:g})"
        )
    inputs = Inputs(**vars(parser.parse_args()))
    for name, make in TABLES.items():
        print(f"{name}\n\n{make(inputs)}\n")


if __name__ == "__main__":
    main()
