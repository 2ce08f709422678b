"""What tests of comparisons share."""

from pathlib import Path

import numpy as np

from mae_vit.finetuning.comparison.cell import Cell
from mae_vit.finetuning.comparison.config import EntrySection
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
