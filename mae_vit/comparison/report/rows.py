"""The results of a comparison's runs: `results.csv`, a row for each cell, and `predictions.npz`.

Gaps, intervals and p values follow from these two files alone (`tests/helpers/comparison.py`).
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from mae_vit.comparison.config import EntrySection, Labels
from mae_vit.comparison.plan import Cell, ComparisonPlan
from mae_vit.comparison.report.significance import Scores
from mae_vit.comparison.spec import cost_of_run
from mae_vit.core.files import read_json_lines
from mae_vit.evaluation.segmentation import IMAGES_FILE, Overlaps
from mae_vit.finetuning.config.modes import MODES
from mae_vit.models.encoder_file import cost_of_weights
from mae_vit.weights.names import origin_of

# Summary fields copied to `results.csv`.
_PROVENANCE = ("precision", "data", "test_data", "train_images", "held_out_images", "test_reads")
_SCORES = (
    ("train_top1", "val_top1", "labels_seen_by_start", "test_top1", "test_top5", "calibration_error"),
    ("train_miou", "val_miou", "labels_seen_by_start", "test_miou", "test_pixel_accuracy"),
)

# Every cell's predictions for every test image, small enough to publish with a table.
PREDICTIONS = "predictions.npz"


@dataclass(frozen=True)
class Row:
    """A finished cell.

    Attributes:
        values: columns of `results.csv`.
        keys: keys of the test images, sorted.
        truth: int (n,), the classes of the test images, in the order of `keys`; empty for segmentation.
        predicted: int (n,), the predicted classes.
        curve: pairs of epoch and validation score.
        num_classes: number of classes, also of those without test images.
        overlaps: pixel counts by test image in the order of `keys`; None for classification.
    """

    cell: Cell
    values: dict[str, Any]
    keys: tuple[str, ...]
    truth: np.ndarray
    predicted: np.ndarray
    curve: tuple[tuple[float, float], ...]
    num_classes: int
    overlaps: Overlaps | None = None

    @property
    def metric(self) -> str:
        """The column that rows are compared by."""
        return "test_top1" if self.overlaps is None else "test_miou"

    @property
    def score(self) -> float:
        """The row's value of `metric`, 0 to 1."""
        return float(self.values[self.metric])

    @property
    def scores(self) -> Scores:
        """Scores by image, from which gaps are computed."""
        seed = None if self.cell.fixed else self.cell.seed
        return Scores(seed, self.truth == self.predicted, self.keys, self.overlaps)

    @property
    def size(self) -> int:
        """Number of labeled images, trained on or for validation; for few-shot, those of its largest draw."""
        images = int(self.values["train_size"] + (self.values["val_size"] or 0))
        if self.values.get("shots"):
            # A class may have fewer.
            return min(images, int(self.values["shots"]) * self.num_classes)
        return images


def row_title(entry: EntrySection, origin: str | None = None) -> str:
    """Returns an entry's name for tables, with the origin of third-party weights, as its run or their name says."""
    origin = origin or origin_of(entry.start)
    return f"{entry.name} ({origin})" if origin else entry.name


def describe_labels(count: Labels) -> str:
    """Returns text such as "10 labels for each class"."""
    return "all labels" if count == "all" else f"{count} labels for each class"


def read_rows(plan: ComparisonPlan) -> list[Row]:
    """Reads the finished cells."""
    return [_read(plan, cell) for cell in plan.cells if cell.run.is_done()]


def _read(plan: ComparisonPlan, cell: Cell) -> Row:
    summary, folder = cell.run.summary, cell.run.folder
    details, environment = (
        json.loads((folder / f"{name}.json").read_text()) for name in ("results", "environment")
    )
    table = list(csv.DictReader(io.StringIO((folder / "predictions.csv").read_text())))
    order = sorted(range(len(table)), key=lambda number: table[number]["key"])
    lines = [table[number] for number in order]
    keys = tuple(line["key"] for line in lines)
    overlaps, truth, predicted = None, np.zeros(0, int), np.zeros(0, int)
    if MODES[cell.mode].labels == "mask":
        with np.load(folder / IMAGES_FILE) as arrays:
            counts = [arrays[name][order].astype(float) for name in ("intersections", "unions")]
        overlaps = Overlaps(*counts)
    else:
        numbers = {name: number for number, name in enumerate(details["classes"])}
        truth, predicted = (
            np.array([numbers[line[name]] for line in lines]) for name in ("label", "prediction")
        )
    # Its own length: the runs that it equals may not have ended.
    run = replace(cell.run, steps=summary["total_steps"]) if cell.run.equal_compute else cell.run
    settings = plan.distinguishing_settings(cell.entry, cell.mode, run.determined())
    values: dict[str, Any] = {
        "entry": cell.entry.name,
        "model": summary.get("model"),
        "img_size": "x".join(map(str, summary["img_size"])) if "img_size" in summary else None,
        "start": cell.entry.start or "scratch",
        "start_origin": summary.get("start_origin"),
        "labels_per_class": cell.labels,
        "mode": cell.mode,
        "shots": max(map(int, summary["few_shot"])) if summary.get("few_shot") else None,
        "seed": cell.seed,
        "settings": json.dumps(settings, sort_keys=True),
        "run": str(folder.relative_to(plan.folder)),
        "parameters": summary.get("parameters"),
        "train_size": summary.get("train_size"),
        "val_size": summary.get("val_size"),
        "test_split": details["test_split"],
        "test_size": summary.get("test_size"),
        "best_step": summary.get("best_step"),
        **{name: summary.get(name) for name in _SCORES[overlaps is not None]},
        # What a reader needs to run the cell again, or to see why another run differs.
        "commit": environment.get("git_commit") or f"none; sources {environment.get('source_digest')}",
        "torch": environment.get("packages", {}).get("torch"),
        "hardware": ", ".join([environment.get("processor") or "", *environment.get("gpus", ())]),
        **{name: summary.get(name) for name in _PROVENANCE},
    }
    weights, pretraining = plan.weights(cell.entry)
    before, own = cost_of_weights(weights), cost_of_run(summary)
    # Weights that this pretraining began from do not count: the machine that trained them is not known.
    pretrain_s = pretraining.summary.get("wall_s") if pretraining else 0.0 if weights is None else None
    values |= {
        "images_seen": own.images_seen,
        "finetune_flops": own.flops,
        "pretrain_images_seen": before.images_seen,
        "pretrain_flops": before.flops,
        "finetune_s": _rounded(summary.get("wall_s")),
        "pretrain_s": _rounded(pretrain_s),
    }
    curve = tuple(_curve(folder / "metrics.jsonl"))
    return Row(cell, values, keys, truth, predicted, curve, len(details["classes"]), overlaps)


def _curve(metrics: Path) -> list[tuple[float, float]]:
    """Returns epochs and scores of validation images; empty for a run that logs none."""
    lines = read_json_lines(metrics) if metrics.exists() else []
    return [
        (line["epoch"], line["heldout"][name])
        for line in lines
        for name in ("top1", "miou")
        if name in line.get("heldout", {})
    ]


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 1)


def table(rows: Sequence[Row]) -> str:
    """Returns `results.csv`. Equal runs give equal text, except for times, the last columns."""
    stream = io.StringIO()
    writer = csv.DictWriter(stream, list(rows[0].values) if rows else ["entry"], lineterminator="\n")
    writer.writeheader()
    writer.writerows(row.values for row in rows)
    return stream.getvalue()


def pack_predictions(rows: Sequence[Row]) -> bytes:
    """Packs the predictions of all cells, compressed.

    `cells` is JSON: each row's number in `results.csv`, its split I, and whether all seeds give its result. A test
    split I has `keys_I` (n,), `truth_I` (n,) and `predicted_I` (cells, n); for segmentation `intersections_I` and
    `unions_I` (cells, n, K) in pixels. Integers have the smallest unsigned type.
    """
    splits: dict[tuple[bool, tuple[str, ...]], list[int]] = {}
    for number, row in enumerate(rows):
        splits.setdefault((row.overlaps is not None, row.keys), []).append(number)
    arrays: dict[str, Any] = {}
    cells = []
    for split, ((segmented, keys), numbers) in enumerate(splits.items()):
        arrays[f"keys_{split}"] = np.array(keys)
        shown = [rows[number] for number in numbers]
        integers: dict[str, Any] = {"truth": shown[0].truth, "predicted": [row.predicted for row in shown]}
        if segmented:
            counts = [row.overlaps for row in shown if row.overlaps]
            integers = {name: [getattr(one, name) for one in counts] for name in ("intersections", "unions")}
        for name, given in integers.items():
            values = np.array(given)
            arrays[f"{name}_{split}"] = values.astype(np.min_scalar_type(int(values.max())))
        cells += [{"row": number, "split": split, "fixed": rows[number].cell.fixed} for number in numbers]
    stream = io.BytesIO()
    np.savez_compressed(stream, cells=np.array(json.dumps(cells)), **arrays)
    return stream.getvalue()
