"""Accuracies of the comparisons: means of results.csv, and intervals of report.md."""

from __future__ import annotations

import csv
import io
import json
import re
from functools import cache
from statistics import mean, stdev
from typing import Any

from page_tables.files import decimal, load, table, text

FIVE_K, BIT, TRANSFER = "compare_cifar10_5k", "compare_cifar10_bit", "compare_cifar10_transfer"
TRIED = "tuning_cifar10_5k.json"
LONGER, RESNET_LONGER, CNN_LONGER = (
    "compare_cifar10_longer",
    "SmallResNet, 314 epochs",
    "SimpleCNN, 287 epochs",
)
PHOTOS_CNN, RESNET_257 = "study_length_tiny_imagenet_cnn", "SmallResNet, 257 epochs"
SCRATCH_500, EPOCHS_500 = "compare_cifar10_scratch_longer", "ViT-Tiny from scratch, 500 epochs"
FINETUNE_LONGER, CONTRAST_100 = (
    "compare_cifar10_finetune_longer",
    "ViT-Tiny from MAE with contrast, 100 epochs",
)
LENGTH, LENGTH_PHOTOS = "study_length", "study_length_tiny_imagenet"
SCRATCH, MEAN_COLOR = "ViT-Tiny from scratch", "ViT-Tiny from mean color"
MAE, CONTRAST = "ViT-Tiny from MAE", "ViT-Tiny from MAE with contrast"
CNN, RESNET, SMALL_BIT = "SimpleCNN", "SmallResNet", "SmallBiT"
LABELS = "ViT-Tiny from labels of other images"
MAE_15, SCRATCH_LONGER = "ViT-Tiny from MAE, 15 epochs", "ViT-Tiny from scratch, compute of MAE's 15 epochs"


@cache
def rows(comparison: str) -> dict[str, list[dict[str, str]]]:
    """The rows of a results.csv, one for each seed, by entry."""
    by_entry: dict[str, list[dict[str, str]]] = {}
    for row in csv.DictReader(io.StringIO(text(f"{comparison}/results.csv"))):
        by_entry.setdefault(row["entry"], []).append(row)
    return by_entry


def percent(comparison: str, entry: str, column: str = "test_top1", *, mode: str = "finetune") -> list[float]:
    """A column of an entry in percent, one value for each seed; none if it has no such mode."""
    return [100 * float(row[column]) for row in rows(comparison)[entry] if row["mode"] == mode]


def accuracy(comparison: str, entry: str, column: str = "test_top1", *, digits: int = 1) -> str:
    """An accuracy in percent, mean over seeds; the one on test images by default."""
    return decimal(mean(percent(comparison, entry, column)), digits)


def spread(values: list[float]) -> str:
    """Mean and standard deviation; a single value has none."""
    return f"{decimal(mean(values))} ± {decimal(stdev(values))}" if len(values) > 1 else decimal(values[0])


def pflop(comparison: str, entry: str, *columns: str) -> float:
    """Model PFLOP of a run, summed over columns of results.csv."""
    return sum(float(rows(comparison)[entry][0][column]) for column in columns) / 1e15


def whole_pflop(comparison: str, entry: str) -> float:
    """PFLOP of pretraining and fine-tuning together."""
    return pflop(comparison, entry, "pretrain_flops", "finetune_flops")


def _results_of_report(comparison: str) -> list[str]:
    """The lines of report.md above its settings."""
    return text(f"{comparison}/report.md").partition("\n## Settings\n")[0].splitlines()


def above(comparison: str, entry: str, other: str) -> tuple[str, str, str]:
    """Points of an entry above another, and both ends of the 95 % interval, of report.md's table of pairs.

    A test computes the report's intervals again, from the predictions beside it.
    """
    lines = _results_of_report(comparison)
    (start,) = (index for index, line in enumerate(lines) if line.startswith("| above |"))
    names = [cell.strip() for cell in lines[start].split("|")[2:-1]]
    (row,) = (line for line in lines[start + 2 :] if line.startswith(f"| {entry} |"))
    cell = row.split("|")[2 + names.index(other)].strip(" ()")
    points, _, interval = cell.partition(" ")
    low, high = interval.strip("[]*").split(", ")
    return points.lstrip("+"), low, high


def above_reference(comparison: str, entry: str) -> tuple[str, str, str]:
    """Points of an entry above the comparison's reference, and both ends of the interval, of report.md's table."""
    (row,) = (line for line in _results_of_report(comparison) if line.startswith(f"| {entry} |"))
    found = re.search(r"\+?(-?[\d.]+) \[(-?[\d.]+), (-?[\d.]+)\]", row)
    assert found is not None
    return found[1], found[2], found[3]


def few_labels() -> str:
    """CIFAR-10 with 5,000 labels, in the order of test accuracy."""
    lines = []
    for entry in sorted(rows(FIVE_K), key=lambda each: mean(percent(FIVE_K, each))):
        points, low, high = ("", "", "") if entry == SCRATCH else above(FIVE_K, entry, SCRATCH)
        gap = f"{points} ({low} to {high})" if len(percent(FIVE_K, entry)) > 1 else f"{points} (one seed)"
        frozen = percent(FIVE_K, entry, mode="few_shot")
        lines.append(
            [
                entry,
                f"{spread(percent(FIVE_K, entry))} %",
                gap if points else "",
                f"{accuracy(FIVE_K, entry, 'train_top1')} %",
                f"{spread(frozen)} %" if frozen else "",
                f"{whole_pflop(FIVE_K, entry):.2f}",
            ]
        )
    head = ["5,000 labels", "fine-tuned: test accuracy", "points above scratch (95 % interval)"]
    return table([*head, "on training images", "frozen: test accuracy", "whole model PFLOP"], lines)


_STARTS = (
    "pretraining",
    "fine-tuned: test accuracy",
    "points above scratch (95 % interval)",
    "frozen: test accuracy",
)


def _start(comparison: str, entry: str, scratch: str) -> list[str]:
    """A line below `_STARTS`; CNNs have no frozen features."""
    points, low, high = ("", "", "") if entry == scratch else above(comparison, entry, scratch)
    gap = f"{points} ({low} to {high})" if points else ""
    frozen = percent(comparison, entry, mode="few_shot")
    fine_tuned = f"{spread(percent(comparison, entry))} %"
    return [entry.removeprefix("ViT-Tiny from "), fine_tuned, gap, f"{spread(frozen)} %" if frozen else ""]


def length(comparison: str) -> str:
    """How many steps of pretraining begin to pay. The first row is from scratch."""
    scratch, *_ = rows(comparison)
    return table(_STARTS, [_start(comparison, entry, scratch) for entry in rows(comparison)])


def transfer() -> str:
    """Pretraining on other images."""
    lines = [
        [*_start(TRANSFER, entry, SCRATCH), f"{pflop(TRANSFER, entry, 'pretrain_flops'):.2f}"]
        for entry in rows(TRANSFER)
    ]
    return table([*_STARTS, "pretraining, model PFLOP"], lines)


def batch_of(comparison: str, entry: str) -> int:
    """The batch that held-out images chose."""
    batch: int = json.loads(rows(comparison)[entry][0]["settings"])["train.effective_batch_size"]
    return batch


def _in_words(setting: dict[str, Any]) -> str:
    words = f"batch {setting['train.effective_batch_size']}, rate {setting['optim.lr']:g}"
    return (
        words
        + ", mixup and cutmix" * ("finetune.mixup" in setting)
        + ", [CLS]" * ("finetune.pool" in setting)
    )


def chosen_settings() -> str:
    """Accuracies beside the settings that held-out images chose; other rows have the setting of one of these."""
    tried = load(TRIED)["entries"]
    chosen = {
        entry: json.loads(of_entry[0]["settings"])
        for entry, of_entry in rows(FIVE_K).items()
        if entry in tried
    }
    lines = [[entry, accuracy(FIVE_K, entry), _in_words(setting)] for entry, setting in chosen.items()]
    lines.sort(key=lambda line: float(line[1]))
    return table(["", "test %", "setting chosen on held-out images"], lines)


def tried_settings() -> str:
    """The accuracy on held-out training images of every setting that was tried, earlier and now."""
    file = load(TRIED)
    lines = [
        [
            entry,
            _in_words(one["setting"]),
            *(decimal(one[part]) if part in one else "" for part in ("earlier", "now")),
        ]
        for entry, tried in file["entries"].items()
        for one in tried
    ]
    return table(["", "setting", "held-out %, earlier (500 images)", "held-out %, now (2,000 images)"], lines)


def gain_through_cls() -> tuple[str]:
    """Held-out points that [CLS] gives to the row from labels of other images, over the mean at the same setting."""
    by_setting = {_in_words(one["setting"]): one["now"] for one in load(TRIED)["entries"][LABELS]}
    (through_cls,) = (setting for setting in by_setting if setting.endswith(", [CLS]"))
    return (decimal(by_setting[through_cls] - by_setting[through_cls.removesuffix(", [CLS]")]),)


def plain(part: str, model: str) -> list[float]:
    """Test accuracies in percent of plain_small_data.json, one for each seed."""
    # The file has float32; accuracies of 10,000 images have four decimals.
    runs = load("plain_small_data.json")[part]
    return [100 * round(run["test"], 4) for run in runs if run["model"] == model]


def plain_script() -> str:
    """The independent script beside our code."""
    models = {"ViT-Tiny": "vit", "SimpleCNN": "cnn", "SmallResNet": "resnet"}
    lines = [
        [name, *(spread(plain(part, model)) for part in ("runs", "runner"))] for name, model in models.items()
    ]
    return table(["", "plain script", "our code"], lines)
