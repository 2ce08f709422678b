"""Figures of pretraining runs: pretraining.json, and the headers of the included encoders."""

from __future__ import annotations

import json
from typing import Any

from page_tables.files import RESULTS, decimal, load, table

FILE, CONTRAST, RANKME = "pretraining.json", "contrast.json", "rankme.json"
_LENGTH = "`mae_cifar_tiny`", "mae_cifar_tiny with `train.epochs=100 train.warmup_epochs=5`"
_COLORS = "`masked_patch_cifar_tiny`", "masked_patch_cifar_tiny with `train.epochs=40`"
IMAGES_OF_AN_EPOCH = 50_000


def run(name: str) -> dict[str, Any]:
    """A run's figures."""
    content: dict[str, Any] = load(FILE)[name]
    return content


def db(name: str, metric: str = "psnr_db", digits: int = 2) -> str:
    """A held-out metric in dB."""
    return f"{run(name)['heldout'][metric]:.{digits}f}"


def percent(name: str, metric: str = "accuracy_on_mask") -> str:
    """A held-out share in percent."""
    return f"{100 * run(name)['heldout'][metric]:.1f}"


def epochs(name: str) -> int:
    """Epochs over CIFAR-10's training images."""
    return round(run(name)["samples"] / IMAGES_OF_AN_EPOCH)


def hours(name: str) -> tuple[str, str]:
    """Hours that a run took, and that it takes at its median rate."""
    return f"{run(name)['wall_s'] / 3600:.1f}", f"{_seconds_at_median(name) / 3600:.1f}"


def minutes(name: str) -> tuple[str, str]:
    """The same in minutes."""
    return f"{run(name)['wall_s'] / 60:.0f}", f"{_seconds_at_median(name) / 60:.0f}"


def _seconds_at_median(name: str) -> float:
    seconds: float = run(name)["samples"] / run(name)["images_per_s_median"]
    return seconds


def encoder_gflop(name: str) -> float:
    """GFLOP of an image in pretraining (3 x forward), of an included encoder's header."""
    with (RESULTS / "encoders" / f"{name}.safetensors").open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(json.loads(file.read(length))["__metadata__"]["mae_vit"])
    gflop: float = header["flops"] / header["images_seen"] / 1e9
    return gflop


def contrast() -> str:
    """MAE, more of it, and MAE with a contrast after it: frozen features, and fine-tuned."""
    names = {
        "MAE, 100 epochs": "mae_cifar_tiny_100",
        "the same, then 57 epochs of MAE": "mae_cifar_tiny_157",
        "the same, then 40 epochs of the contrast's recipe without the contrast": "mae_cifar_tiny_crops_40",
        "the same, then 40 epochs with the contrast": "contrastive_mae_cifar_tiny_40",
    }
    rows = []
    for row, name in names.items():
        encoder = load(CONTRAST)["encoders"][name]
        few, tuned = encoder["few_shot_300"], encoder["fine_tuned_5000"]
        rows.append(
            [
                row,
                decimal(100 * encoder["neighbors"]),
                f"{decimal(100 * few['mean'])} ± {decimal(100 * few['std'])}",
                ", ".join(decimal(100 * score) for score in tuned),
                decimal(100 * sum(tuned) / len(tuned)),
            ]
        )
    head = ["encoder", "neighbors, %", "300 labels of each class, %", "fine-tuned, two seeds, %", "mean, %"]
    return table(head, rows)


def contrast_psnr() -> tuple[str, str]:
    """Held-out PSNR in dB with half of the patches masked: of the contrast, and of its recipe without its loss."""
    return db("contrastive_mae_cifar_tiny_40", digits=1), db("mae_cifar_tiny_crops_40", digits=1)


def contrast_gains(
    other: str = "mae_cifar_tiny_157", encoder: str = "contrastive_mae_cifar_tiny_40"
) -> tuple[str, ...]:
    """Points of an encoder above another: by neighbors, fine-tuned in the mean, and in each seed."""
    ours, theirs = (load(CONTRAST)["encoders"][name] for name in (encoder, other))
    by_seed = [100 * (a - b) for a, b in zip(ours["fine_tuned_5000"], theirs["fine_tuned_5000"], strict=True)]
    gains = (100 * (ours["neighbors"] - theirs["neighbors"]), sum(by_seed) / len(by_seed), *by_seed)
    return tuple(decimal(gain) for gain in gains)


def rankme() -> str:
    """RankMe and the standard deviation of features beside two probes, in the order of the few-shot probe."""
    names = {
        "random": "random weights",
        **{f"mae_{n}": f"MAE, {n} {'epoch' if n == 1 else 'epochs'}" for n in (1, 2, 3, 4)},
        "masked_patch_40": "mean color, 40 epochs",
        "joint_15": "MAE and mean color, 15 epochs",
        "mae_100": "MAE, 100 epochs",
        "contrastive_mae_40": "MAE with a contrast",
        "supervised_15": "supervised, 15 epochs",
    }
    lines = [
        [
            names[each["name"]],
            decimal(each["rankme"]),
            decimal(each["feature_std"], 2),
            decimal(100 * each["few_shot_top1"]),
            decimal(100 * each["knn_top1"]),
        ]
        for each in sorted(load(RANKME)["encoders"], key=lambda each: float(each["few_shot_top1"]))
    ]
    return table(["encoder", "RankMe", "standard deviation", "few-shot, %", "neighbors, %"], lines)


def rank_correlations(measure: str = "rankme") -> tuple[str, ...]:
    """A measure with few-shot and with neighbors: of all encoders, and of those that saw no labels."""
    return tuple(
        f"{load(RANKME)[group][f'{measure}, {probe}_top1']['rho']:.2f}"
        for group in ("correlations", "correlations_without_labels")
        for probe in ("few_shot", "knn")
    )


def pretraining_runs() -> str:
    """Each run with its held-out metric and its baseline."""
    mae, mae_100 = "mae_cifar_tiny", "mae_cifar_tiny_100"
    colors, colors_40 = "masked_patch_cifar_tiny", "masked_patch_cifar_tiny_40"
    joint, supervised = "joint_cifar_tiny", "supervised_cifar_tiny"
    psnr, nearest = db(mae, "psnr_baseline_db"), percent(colors, "accuracy_nearest_visible")
    both = f"**{db(joint, 'mae_psnr_db')} dB**, **{percent(joint, 'masked_patch_accuracy_on_mask')} %**"
    pixels, positions = "PSNR on masked patches", "accuracy on [mask] positions"
    rows = [
        [
            _LENGTH[0],
            epochs(mae),
            pixels,
            f"{psnr} dB (true patch mean and std, no content)",
            f"**{db(mae)} dB**",
        ],
        [_LENGTH[1], epochs(mae_100), pixels, f"{psnr} dB", f"**{db(mae_100)} dB**"],
        [
            _COLORS[0],
            epochs(colors),
            f"{positions}, 512 colors",
            f"{nearest} % (copy of the nearest visible patch)",
            f"**{percent(colors)} %**",
        ],
        [_COLORS[1], epochs(colors_40), positions, f"{nearest} %", f"**{percent(colors_40)} %**"],
        ["`joint_cifar_tiny`", epochs(joint), "both", "both", both],
        [
            "`supervised_cifar_tiny`, with labels",
            epochs(supervised),
            "accuracy",
            "10 % (chance)",
            f"**{percent(supervised, 'accuracy')} %**",
        ],
    ]
    return table(["pretraining run", "epochs", "held-out metric", "baseline", "measured"], rows)
