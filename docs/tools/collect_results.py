"""Collects runs into what the README shows: curves, last pictures, and a JSON of numbers.

    python docs/tools/collect_results.py runs/mae_cifar_tiny runs/masked_patch_cifar_tiny
    python docs/tools/collect_results.py runs/supervised_cifar_tiny --probe runs/mae_cifar_tiny

Writes docs/results/NAME_curves.png and docs/results/NAME.png (the last pictures) for each run, docs/results/probe.png
for all of them, their encoders in half precision under docs/results/encoders/, and their part of
docs/results/pretraining.json; what is there of other runs stays. The final numbers are measured again on the whole
held-out split, from each run's newest checkpoint. `docs/tools/tables.py --write` then puts them into the pages.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib
from safetensors import safe_open
from safetensors.torch import save_file

# So that a checkout runs without being installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from mae_vit.config.load import load_config
from mae_vit.config.plan import make_plan
from mae_vit.core.files import read_json_lines
from mae_vit.objectives.pretrain_config import PretrainConfig
from mae_vit.pretraining.data import open_data
from mae_vit.pretraining.setup import build_objective, describe_encoder
from mae_vit.runtime.device import find_device
from mae_vit.runtime.ranks import Ranks
from mae_vit.training.checkpoints.checkpoint import load_checkpoint, newest_checkpoint
from mae_vit.training.engines.build import build_engine

matplotlib.use("Agg")
import matplotlib.pyplot as plt

OUT = Path(__file__).resolve().parents[1] / "results"
# What held-out curves show: metric, its baseline, how the axis is called.
HELD_OUT: dict[str, tuple[str, str | None, str]] = {
    "mae": ("psnr_db", "psnr_baseline_db", "PSNR on masked patches, dB"),
    "masked_patch": ("accuracy_on_mask", "accuracy_nearest_visible", "accuracy on [mask] positions"),
    "joint": ("mae_psnr_db", "mae_psnr_baseline_db", "PSNR on masked patches, dB"),
    "contrastive_mae": ("psnr_db", "psnr_baseline_db", "PSNR on masked patches, dB"),
    "simmim": ("psnr_db", "psnr_baseline_db", "PSNR on masked patches, dB"),
    "supervised": ("accuracy", None, "accuracy"),
}
NAMES = {
    "psnr_baseline_db": "true patch statistics, no content",
    "accuracy_nearest_visible": "copy of the nearest visible patch",
}


def read(run: Path) -> dict[str, Any]:
    """Reads a run: metrics, summary, environment, and the objective's name."""
    lines = read_json_lines(run / "metrics.jsonl")
    return {
        "name": run.name,
        "objective": load_config(PretrainConfig, run / "config.yaml").objective.name,
        "lines": lines,
        "summary": json.loads((run / "summary.json").read_text()),
        "environment": json.loads((run / "environment.json").read_text()),
    }


def draw(run: dict[str, Any], path: Path) -> None:
    """Draws training loss, and the held-out metric with its baseline."""
    figure, (loss, held_out) = plt.subplots(1, 2, figsize=(8, 2.6), layout="constrained")
    loss.plot([line["epoch"] for line in run["lines"]], [line["loss"] for line in run["lines"]])
    loss.set(title=run["name"], xlabel="epoch", ylabel="training loss")
    metric, baseline, label = HELD_OUT[run["objective"]]
    lines = [line for line in run["lines"] if "heldout" in line]
    epochs = [line["epoch"] for line in lines]
    held_out.plot(epochs, [line["heldout"][metric] for line in lines], label="model")
    if baseline is not None:
        name = NAMES[baseline.removeprefix("mae_")]
        held_out.plot(epochs, [line["heldout"][baseline] for line in lines], "--", label=name)
    held_out.set(title="held-out images", xlabel="epoch", ylabel=label)
    held_out.legend(fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def draw_probe(runs: list[dict[str, Any]], path: Path) -> None:
    """Draws the online probe's scores of all runs on one picture."""
    figure, axes = plt.subplots(1, 2, figsize=(8, 3.8), sharey=True, layout="constrained")
    for run in runs:
        lines = [line for line in run["lines"] if "probe" in line]
        for part, (metric, title) in zip(
            axes,
            {"few_shot_top1": "25 shots, least squares", "knn_top1": "nearest neighbors"}.items(),
            strict=True,
        ):
            part.plot(
                [line["epoch"] for line in lines],
                [100 * line["probe"][metric] for line in lines],
                label=run["name"] + ("" if run["summary"]["status"] == "done" else " (goes on)"),
            )
            part.set(title=title, xlabel="epoch")
    axes[0].set_ylabel("held-out top-1 of frozen features, %")
    # Above the curves, which fill the axes.
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=2, fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def evaluate(path: Path, overrides: list[str]) -> dict[str, Any]:
    """Measures a run's newest checkpoint on all images of its held-out split, fixed masks."""
    config = load_config(PretrainConfig, path / "config.yaml", [*overrides, "train.engine=torch"])
    ranks, device = Ranks(), find_device(Ranks())
    data = open_data(config, ranks, device)
    plan = make_plan(config, num_samples=data.num_samples, world_size=1)
    objective = build_objective(config, describe_encoder(config, data), num_classes=data.num_classes)
    engine = build_engine(config, plan, objective, ranks, device)
    checkpoint = newest_checkpoint(path / "checkpoints")
    assert checkpoint is not None
    engine.restore(load_checkpoint(checkpoint.path).state)
    assert data.held_out_index is not None
    images = len(data.held_out_index)
    held_out = data.held_out(ranks, images=images, picture_images=1, batch_size=250)
    assert held_out is not None
    metrics = held_out.evaluate(engine)
    return {"split": data.held_out_index.split, "images": images, "step": checkpoint.step, **metrics}


def keep_encoder(run: Path, path: Path) -> None:
    """Copies an encoder in float16, half the size: about three digits of each weight."""
    with safe_open(run / "encoder.safetensors", framework="pt") as content:
        tensors = {name: content.get_tensor(name).half() for name in content.keys()}  # noqa: SIM118
        metadata = content.metadata()
    path.parent.mkdir(exist_ok=True)
    save_file(tensors, path, metadata)


def numbers(run: dict[str, Any], heldout: dict[str, Any]) -> dict[str, Any]:
    """The figures worth keeping, with what they rest on."""
    environment = run["environment"]
    return {
        "steps": run["summary"]["steps"],
        "samples": run["summary"]["samples"],
        "wall_s": round(run["summary"]["wall_s"]),
        "loss": run["summary"]["loss"],
        "heldout": heldout,
        "images_per_s_median": round(median(line["images_per_s"] for line in run["lines"])),
        "data_wait_frac_median": round(median(line["data_wait_frac"] for line in run["lines"]), 4),
        "command": " ".join(environment["command"]),
        "git_commit": environment["git_commit"],
        "world_size": environment["world_size"],
        "processor": environment["processor"],
        "packages": environment["packages"],
    }


def main() -> None:
    """Collects the runs named on the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folders of finished runs")
    parser.add_argument(
        "--override",
        action="append",
        default=[],
        metavar="KEY.PATH=VALUE",
        help="change a value of the runs' configs, e.g. data.path=data/cifar10; may be repeated",
    )
    parser.add_argument(
        "--probe",
        nargs="+",
        default=[],
        type=Path,
        metavar="RUN",
        help="more runs, for the picture of the online probe alone; they need not be finished",
    )
    arguments = parser.parse_args()
    runs = [read(path) for path in arguments.runs]
    OUT.mkdir(exist_ok=True)
    draw_probe([*runs, *map(read, arguments.probe)], OUT / "probe.png")
    results_file = OUT / "pretraining.json"
    results = json.loads(results_file.read_text()) if results_file.exists() else {}
    for run, path in zip(runs, arguments.runs, strict=True):
        keep_encoder(path, OUT / "encoders" / f"{run['name']}.safetensors")
        draw(run, OUT / f"{run['name']}_curves.png")
        shutil.copy(max((path / "pictures").glob("step-*.png")), OUT / f"{run['name']}.png")
        results[run["name"]] = numbers(run, evaluate(path, arguments.override))
    results_file.write_text(json.dumps(results, indent=2) + "\n")
    print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
