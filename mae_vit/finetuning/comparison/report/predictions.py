"""`predictions.npz`: what every cell predicts for every test image, small enough to publish with a table.

From it and `results.csv` alone, `read_scores` gives what gaps, intervals and p values are computed from.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mae_vit.core.errors import InputError
from mae_vit.evaluation.segmentation import Overlaps
from mae_vit.finetuning.comparison.report.rows import Row
from mae_vit.finetuning.comparison.report.significance import Scores

PREDICTIONS = "predictions.npz"
CLASS_ARRAYS, SEGMENTATION_ARRAYS = ("truth", "predicted"), ("intersections", "unions")
# entry, labels of each class, mode
Group = tuple[str, str, str]


def pack_predictions(rows: Sequence[Row]) -> bytes:
    """Packs what all cells predict, compressed.

    Arrays: `cells`, JSON with a row's number in `results.csv` and whether all seeds give its result; for each test
    split `keys_I` (n,), `truth_I` (n,) and `predicted_I` (cells, n), or of segmentation the pixels of each class
    `intersections_I` and `unions_I` (cells, n, K); in the smallest unsigned integers.
    """
    splits: dict[tuple[bool, tuple[str, ...]], list[int]] = {}
    for number, row in enumerate(rows):
        splits.setdefault((row.overlaps is not None, row.keys), []).append(number)
    arrays: dict[str, Any] = {}
    cells = []
    for split, ((_, keys), numbers) in enumerate(splits.items()):
        arrays[f"keys_{split}"] = np.array(keys)
        counts = [rows[number].overlaps for number in numbers]
        integers = {
            "intersections": [overlaps.intersections for overlaps in counts if overlaps],
            "unions": [overlaps.unions for overlaps in counts if overlaps],
            "predicted": [rows[number].predicted for number in numbers],
            "truth": rows[numbers[0]].truth,
        }
        for name in SEGMENTATION_ARRAYS if counts[0] else CLASS_ARRAYS:
            values = np.array(integers[name])
            arrays[f"{name}_{split}"] = values.astype(np.min_scalar_type(int(values.max())))
        cells += [{"row": number, "split": split, "fixed": rows[number].cell.fixed} for number in numbers]
    stream = io.BytesIO()
    np.savez_compressed(stream, cells=np.array(json.dumps(cells)), **arrays)
    return stream.getvalue()


def read_scores(folder: Path) -> dict[Group, list[Scores]]:
    """Reads `results.csv` and `predictions.npz` of a comparison.

    Returns:
        For each entry, number of labels and mode, one `Scores` a seed.

    Raises:
        InputError: if a file is missing, or the two are not of one comparison.
    """
    try:
        with (folder / "results.csv").open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        packed = np.load(folder / PREDICTIONS, allow_pickle=False)
        cells = json.loads(str(packed["cells"]))
    except (OSError, ValueError, KeyError) as error:
        raise InputError(f"{folder} has no results.csv with {PREDICTIONS} beside it: {error}") from None
    if any(cell["row"] >= len(rows) for cell in cells):
        raise InputError(f"{folder}: {PREDICTIONS} has more cells than results.csv")
    groups: dict[Group, list[Scores]] = {}
    in_turn = {split: _results(packed, split) for split in {cell["split"] for cell in cells}}
    for cell in cells:
        split, row = cell["split"], rows[cell["row"]]
        correct, overlaps = next(in_turn[split])
        seed = None if cell["fixed"] else int(row["seed"])
        scores = Scores(seed, correct, tuple(packed[f"keys_{split}"].tolist()), overlaps)
        groups.setdefault((row["entry"], row["labels_per_class"], row["mode"]), []).append(scores)
    return groups


def _results(packed: Mapping[str, np.ndarray], split: int) -> Iterator[tuple[np.ndarray, Overlaps | None]]:
    """Yields what each cell of a split got right: of classes, or of pixels."""
    if f"unions_{split}" not in packed:
        for predicted in packed[f"predicted_{split}"]:
            yield predicted == packed[f"truth_{split}"], None
        return
    for both, either in zip(packed[f"intersections_{split}"], packed[f"unions_{split}"], strict=True):
        yield np.zeros(0, bool), Overlaps.from_counts(both.astype(float), either.astype(float))
