"""What tests of comparisons share."""

from pathlib import Path

import numpy as np

from mae_vit.finetuning.comparison.config import EntrySection
from mae_vit.finetuning.comparison.jobs import Job
from mae_vit.finetuning.comparison.matrix import Cell
from mae_vit.finetuning.comparison.report.rows import Row


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
    return Row(cell, {"test_top1": float(correct.mean())}, correct, keys, (), {})
