"""What tests of comparisons share."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from mae_vit.finetuning.comparison.cell import Cell
from mae_vit.finetuning.comparison.config import CompareConfig, EntrySection
from mae_vit.finetuning.comparison.jobs import Job
from mae_vit.finetuning.comparison.report.rows import Row
from mae_vit.finetuning.comparison.report.significance import Gap, gap_between


def row(name: str, seed: int, correct: np.ndarray, *, fixed: bool = False) -> Row:
    """A finished cell with nothing in it but which test images are found."""
    cell = Cell(
        EntrySection(name=name, config="x"),
        "all",
        "finetune",
        seed,
        {},
        Job(name, Path(name), "x", Path("x"), (), "x"),
        fixed,
    )
    keys = tuple("abcdefghij"[: len(correct)]) if len(correct) <= 10 else tuple(map(str, range(len(correct))))
    nothing = np.zeros(len(correct), int)
    return Row(cell, {"test_top1": float(correct.mean())}, keys, correct, nothing, nothing, (), {})


def gap_of(rows: list[Row], others: list[Row]) -> Gap | None:
    """The gap between two entries, from their rows."""
    return gap_between([one.scores for one in rows], [other.scores for other in others])


_TESTED = 1000
_VALUES = {
    "val_size": 0, "test_size": _TESTED, "test_split": "test", "parameters": 1, "finetune_flops": 1.0,
    "pretrain_flops": 0.0,
}  # fmt: skip


def rows_of(
    name: str, shares: list[float], *, start: str | None = None, seen: str | None = None, labels: int = 200
) -> list[Row]:
    """A row for each seed; `shares` of the test images are classified correctly, the easy ones."""
    found = []
    for seed, share in enumerate(shares):
        one = row(name, seed, np.arange(_TESTED) < round(_TESTED * share))
        cell = replace(one.cell, entry=one.cell.entry.model_copy(update={"start": start}), labels=labels)
        more = {"train_size": labels, "labels_seen_by_start": seen}
        found.append(replace(one, cell=cell, values=one.values | _VALUES | more))
    return found


def config_of(rows: list[Row]) -> CompareConfig:
    """A comparison of the entries that the rows name; the first is the reference."""
    names = list(dict.fromkeys(row.cell.entry.name for row in rows))
    entries = [{"name": name, "config": "x.yaml"} for name in names]
    return CompareConfig.model_validate(
        {"run": {"name": "x"}, "data": {"path": "data"}, "entries": entries, "reference": names[0]}
    )
