"""`predictions.npz`: what every cell predicts for every test image, small enough to publish with a table.

From it and `results.csv` alone, `read_scores` gives what gaps, intervals and p values are computed from.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mae_vit.core.errors import InputError
from mae_vit.finetuning.comparison.report.rows import Row
from mae_vit.finetuning.comparison.report.significance import Scores

PREDICTIONS = "predictions.npz"
# entry, labels of each class, mode
Group = tuple[str, str, str]


def pack_predictions(rows: Sequence[Row]) -> bytes:
    """Packs the predicted classes of all cells but those of segmentation, compressed.

    Arrays: `cells`, JSON with a row's place in `results.csv` and whether all seeds give its result; for each test
    split `truth_I` (n,), `keys_I` (n,), and `predicted_I` (cells, n), in the smallest unsigned integers.
    """
    splits: dict[tuple[str, ...], list[int]] = {}
    for number, row in enumerate(rows):
        if row.overlaps is not None:
            continue  # classes of pixels would be too large
        splits.setdefault(row.keys, []).append(number)
    arrays: dict[str, Any] = {}
    cells = []
    for split, (keys, numbers) in enumerate(splits.items()):
        classes = np.stack([rows[number].predicted for number in numbers])
        smallest = np.min_scalar_type(int(max(classes.max(), rows[numbers[0]].truth.max())))
        arrays[f"keys_{split}"] = np.array(keys)
        arrays[f"truth_{split}"] = rows[numbers[0]].truth.astype(smallest)
        arrays[f"predicted_{split}"] = classes.astype(smallest)
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
    places = {split: iter(packed[f"predicted_{split}"]) for split in {cell["split"] for cell in cells}}
    for cell in cells:
        split, row = cell["split"], rows[cell["row"]]
        correct = next(places[split]) == packed[f"truth_{split}"]
        seed = None if cell["fixed"] else int(row["seed"])
        scores = Scores(seed, correct, tuple(packed[f"keys_{split}"].tolist()))
        groups.setdefault((row["entry"], row["labels_per_class"], row["mode"]), []).append(scores)
    return groups
