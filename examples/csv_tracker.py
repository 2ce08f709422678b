"""An experiment tracker of your own: a table of all metrics, one line for each value.

mae-vit pretrain mae_digits 'run.plugins=[examples/csv_tracker.py]' 'monitor.trackers=[csv]'
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from typing import Any

from mae_vit.config.schema import register_tracker
from mae_vit.training.outputs.run_folder import Status
from mae_vit.training.outputs.trackers import ROLLED_BACK, Pictures, Scalars, TrackedRun


class CsvTracker:
    """Appends (step, name, value) to `metrics.csv` in the run folder. A step that comes again has both values."""

    title = "csv"

    def __init__(self, run: TrackedRun) -> None:
        """Names the table. Any id continues the same file; a new id would get all earlier lines again."""
        self.run_id = run.run_id or run.name
        self.where = str(run.folder / "metrics.csv")

    def log(self, step: int, scalars: Scalars, pictures: Pictures) -> None:
        """Writes the metrics of a step; pictures have no place in a table."""
        with open(self.where, "a", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows((step, name, value) for name, value in scalars.items())

    def go_back(self, step: int) -> None:
        """Marks a rollback at the first step after it."""
        self.log(step + 1, {ROLLED_BACK: step}, {})

    def finish(self, status: Status, summary: Mapping[str, Any]) -> None:
        """Leaves the table as it is."""


register_tracker("csv", CsvTracker)
