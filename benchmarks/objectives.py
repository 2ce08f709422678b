"""What a step of each objective costs on the same encoder, and what partial decoding saves.

MAE of a config, decoding all, a half and a quarter of the masked patches; MAE with half of the patches
masked and half of those decoded, without and with a contrast; MAE with the options of Pixio (masked blocks,
several class tokens, a deep decoder); and masked patch prediction, whose encoder sees all patches. Each runs
in a process of its own, in turns. Prints JSON.

    python benchmarks/objectives.py [--config configs/mae_base.yaml] [--batch 8] [--device cpu]
        [--precision auto] [--rounds 5] [--steps 2] [--threads 2] [--out FILE] [KEY.PATH=VALUE ...]
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

# So that a checkout runs without being installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness.reports import add_out, publish
from benchmarks.harness.turns import (
    add_options,
    add_precision,
    choose_device,
    paired,
    serve,
    summarize,
    take_turns,
)
from benchmarks.harness.workloads import ROOT, TINY, Workload, load
from mae_vit.config.load import load_config
from mae_vit.core.errors import InputError
from mae_vit.objectives import ObjectiveSection
from mae_vit.objectives.config import ContrastiveMAEConfig, MAEConfig, MaskedPatchConfig
from mae_vit.objectives.pretrain_config import PretrainConfig
from mae_vit.training.engines.precision import choose_precision

WHOLE = "mae"
PIXIO = ROOT / "configs" / "pixio_cifar_tiny.yaml"
_HALVES = {"mask_ratio": 0.5, "decode_ratio": 0.5}


def variants(workload: Workload) -> dict[str, Workload]:
    """The same encoder under each objective.

    Raises:
        InputError: if the config is not one of MAE.
    """
    mae = workload.config.objective
    if not isinstance(mae, MAEConfig):
        raise InputError(f'--config is one of objective "{mae.name}": give one of "mae"')
    sections: dict[str, ObjectiveSection] = {
        WHOLE: mae.model_copy(update={"decode_ratio": 1.0}),
        "mae decode_ratio=0.5": mae.model_copy(update={"decode_ratio": 0.5}),
        "mae decode_ratio=0.25": mae.model_copy(update={"decode_ratio": 0.25}),
        "mae mask_ratio=0.5 decode_ratio=0.5": mae.model_copy(update=_HALVES),
        "contrastive_mae": _with_contrast(mae, workload),
        "masked_patch": MaskedPatchConfig(name="masked_patch"),
    }
    chosen = {name: workload.with_objective(section) for name, section in sections.items()}
    return {**chosen, "pixio": _with_pixio(mae, workload)}


def _with_pixio(mae: MAEConfig, workload: Workload) -> Workload:
    """The same encoder and mask ratio with the options of `configs/pixio_cifar_tiny.yaml`; the decoder keeps its width.

    Raises:
        InputError: if no such blocks fit the encoder's patches.
    """
    pixio = load_config(PretrainConfig, PIXIO, [])
    assert isinstance(pixio.objective, MAEConfig)
    taken = {name: getattr(pixio.objective, name) for name in ("mask_unit", "decoder_depth")}
    section = mae.model_copy(update={"decode_ratio": 1.0, **taken})
    model = workload.config.model.model_copy(update={"class_tokens": pixio.model.class_tokens})
    info = workload.info
    grid = (info.img_size[0] // info.patch_size, info.img_size[1] // info.patch_size)
    try:
        section.check(grid_size=grid, patch_size=info.patch_size, in_chans=info.in_chans, num_classes=0)
    except ValueError as error:
        raise InputError(f"pixio: {error}") from None
    return replace(workload, config=workload.config.model_copy(update={"model": model, "objective": section}))


def _with_contrast(mae: MAEConfig, workload: Workload) -> ContrastiveMAEConfig:
    """The same masks and decoder with a contrast of as many images as a group of the default takes, at most a batch's.

    Raises:
        InputError: if a batch has no two images in two views.
    """
    largest = ContrastiveMAEConfig(name="contrastive_mae").group_size
    group_size = next((size for size in range(largest, 1, -1) if workload.batch_size % (2 * size) == 0), None)
    if group_size is None:
        raise InputError(
            f"--batch {workload.batch_size} holds no group of two images in two views: give one of 4"
        )
    options = {**mae.model_dump(exclude={"name"}), **_HALVES, "group_size": group_size}
    return ContrastiveMAEConfig.model_validate({"name": "contrastive_mae", **options})


def life(workload: Workload, pipe: Connection) -> None:
    """A contender."""
    serve(workload.steps(), pipe, workload.device())


def compare(times: dict[str, list[float]], workloads: dict[str, Workload]) -> dict[str, Any]:
    """Times, and costs over those of MAE that decodes all, measured and in model FLOPs."""
    flops = {name: workload.flops_per_image for name, workload in workloads.items()}
    return {
        name: {
            "ms_per_step": summarize(values, 2),
            "time_over_mae": summarize(paired(values, times[WHOLE], lambda value, whole: value / whole)),
            "model_gflops_per_image": round(flops[name] / 1e9, 4),
            "flops_over_mae": round(flops[name] / flops[WHOLE], 3),
        }
        for name, values in times.items()
    }


def main() -> None:
    """Measures all variants and prints what they cost."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", type=Path, default=TINY, metavar="FILE", help="of MAE (mae_cifar_tiny)")
    parser.add_argument("--batch", type=int, default=128, metavar="N", help="images per step (128)")
    add_precision(parser)
    parser.add_argument("overrides", nargs="*", metavar="KEY.PATH=VALUE", help="change a value of the config")
    add_options(parser, rounds=5, steps=5, threads=2)
    add_out(parser)
    arguments = parser.parse_intermixed_args()
    device = choose_device(arguments.device)
    arguments.precision = choose_precision(arguments.precision, device).precision
    try:
        workload = load(
            arguments.config,
            arguments.overrides,
            batch_size=arguments.batch,
            precision=arguments.precision,
            threads=arguments.threads,
        )
        workloads = variants(workload)
    except InputError as error:
        raise SystemExit(f"error: {error}") from None
    lives = {name: partial(life, chosen) for name, chosen in workloads.items()}
    times = take_turns(lives, rounds=arguments.rounds, steps=arguments.steps, clock=arguments.clock)
    report = {
        "benchmark": "objectives",
        "config": arguments.config.stem,
        **{
            name: getattr(arguments, name)
            for name in ("batch", "device", "precision", "threads", "rounds", "clock")
        },
        "results": compare(times, workloads),
    }
    publish(report, arguments.out, threads=arguments.threads)


if __name__ == "__main__":
    main()
