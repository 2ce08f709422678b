"""A cell of a comparison's table: one run of one row."""

from __future__ import annotations

from dataclasses import dataclass

from mae_vit.finetuning.comparison.config import EntrySection, Labels, Mode, Overrides
from mae_vit.finetuning.comparison.jobs import Job


@dataclass(frozen=True)
class Cell:
    """One cell of the table.

    Attributes:
        entry: its row.
        labels: labels of each class.
        mode: how it is measured.
        seed: seed of the run.
        point: the settings chosen for it.
        job: its run.
        fixed: whether every seed gives the same result; then one cell stands for all seeds.
    """

    entry: EntrySection
    labels: Labels
    mode: Mode
    seed: int
    point: Overrides
    job: Job
    fixed: bool = False
