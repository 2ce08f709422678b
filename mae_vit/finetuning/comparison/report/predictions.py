"""`predictions.npz`: every cell's predictions for every test image, small enough to publish with a table.

Gaps, intervals and p values follow from it and `results.csv` alone (`tests/helpers/comparison.py`).
"""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from mae_vit.finetuning.comparison.report.rows import Row

PREDICTIONS = "predictions.npz"
CLASS_ARRAYS, SEGMENTATION_ARRAYS = ("truth", "predicted"), ("intersections", "unions")


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
