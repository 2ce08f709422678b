"""What a step of each objective costs on the same encoder, and what partial decoding saves.

MAE of a config, decoding all, a half and a quarter of the masked patches; MAE with half of the patches
masked and half of those decoded, without and with a contrast; MAE with the options of Pixio (masked blocks,
several class tokens, a deep decoder); and masked patch prediction, whose encoder sees all patches. Each runs
in a process, in turns.

    python benchmarks/objectives.py [--out FILE]
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

# So that a checkout runs without being installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness.command import ROOT, make_parser, parse, publish, run
from benchmarks.harness.turns import ratios, summarize, take_turns
from benchmarks.harness.workloads import TINY, Workload, load_for
from mae_vit.config.encoders import ViTSection
from mae_vit.config.load import load_config
from mae_vit.core.errors import InputError
from mae_vit.objectives import ObjectiveSection
from mae_vit.objectives.config import ContrastiveMAEConfig, MAEConfig, MaskedPatchConfig
from mae_vit.objectives.pretrain_config import PretrainConfig

WHOLE = "mae"
PIXIO = ROOT / "configs" / "pretrain" / "pixio_cifar_tiny.yaml"
_HALVES = {"mask_ratio": 0.5, "decode_ratio": 0.5}


def variants(workload: Workload) -> dict[str, Workload]:
    """The same encoder under each objective.

    Raises InputError if the config is not one of MAE, or its batch or patches do not fit a variant.
    """
    mae = workload.mae()
    sections: dict[str, ObjectiveSection] = {
        WHOLE: mae.model_copy(update={"decode_ratio": 1.0}),
        "mae decode_ratio=0.5": mae.model_copy(update={"decode_ratio": 0.5}),
        "mae decode_ratio=0.25": mae.model_copy(update={"decode_ratio": 0.25}),
        "mae mask_ratio=0.5 decode_ratio=0.5": mae.model_copy(update=_HALVES),
        "contrastive_mae": _with_contrast(mae, workload.batch_size),
        "masked_patch": MaskedPatchConfig(name="masked_patch"),
    }
    chosen = {name: workload.with_sections(objective=section) for name, section in sections.items()}
    return {**chosen, "pixio": _with_pixio(mae, workload)}


def _with_pixio(mae: MAEConfig, workload: Workload) -> Workload:
    """The same encoder, mask ratio and decoder width with the options of `configs/pretrain/pixio_cifar_tiny.yaml`."""
    pixio = load_config(PretrainConfig, PIXIO, [])
    assert isinstance(pixio.objective, MAEConfig)
    taken = {name: getattr(pixio.objective, name) for name in ("mask_unit", "decoder_depth")}
    section = mae.model_copy(update={"decode_ratio": 1.0, **taken})
    assert isinstance(pixio.model, ViTSection)
    model = workload.config.model.model_copy(update={"class_tokens": pixio.model.class_tokens})
    try:
        section.check(workload.info.geometry, 0)
    except ValueError as error:
        raise InputError(f"pixio: {error}") from None
    return workload.with_sections(model=model, objective=section)


def _with_contrast(mae: MAEConfig, batch_size: int) -> ContrastiveMAEConfig:
    """Half of the masks and decoder with a contrast, in groups of the default size or as many images as fit."""
    largest = ContrastiveMAEConfig(name="contrastive_mae").group_size
    group_size = next((size for size in range(largest, 1, -1) if batch_size % (2 * size) == 0), None)
    if group_size is None:
        raise InputError(f"--batch {batch_size} holds no group of two images in two views: give one of 4")
    options = {**mae.model_dump(exclude={"name"}), **_HALVES, "group_size": group_size}
    return ContrastiveMAEConfig.model_validate({"name": "contrastive_mae", **options})


def compare(times: dict[str, list[float]], workloads: dict[str, Workload]) -> dict[str, Any]:
    """Times, and costs over those of MAE that decodes all, measured and in model FLOPs."""
    flops = {name: workload.costs.flops_per_image for name, workload in workloads.items()}
    return {
        name: {
            "ms_per_step": summarize(values, 2),
            "time_over_mae": summarize(ratios(values, times[WHOLE])),
            "model_gflops_per_image": round(flops[name] / 1e9, 4),
            "flops_over_mae": round(flops[name] / flops[WHOLE], 3),
        }
        for name, values in times.items()
    }


def main() -> None:
    """Measures all variants and prints what they cost."""
    counts = {"rounds": 5, "steps": 5, "threads": 2}
    arguments = parse(make_parser(__doc__, config=TINY, batch=128, precision="auto", device="cpu", **counts))
    workloads = variants(load_for(arguments))
    lives = {name: workload.live for name, workload in workloads.items()}
    times = take_turns(lives, rounds=arguments.rounds, steps=arguments.steps)
    report = {"benchmark": "objectives", "clock": "wall", "results": compare(times, workloads)}
    publish(report, arguments, "config", "batch", "device", "precision", "threads", "rounds")


if __name__ == "__main__":
    run(main)
