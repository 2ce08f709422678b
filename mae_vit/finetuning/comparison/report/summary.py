"""The rows of a comparison's table: an entry on so many labels, over its seeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mae_vit.finetuning.comparison.config import TUNED_BY, CompareConfig, Labels
from mae_vit.finetuning.comparison.report.rows import Row, group, title_of
from mae_vit.finetuning.comparison.report.significance import Gap, gap_between
from mae_vit.weights.start import origin_of

# By what a run's summary says of its start's labels.
_SEEN = {
    "held-out": "its start or teacher was trained with the held-out labels, so its held-out accuracy is too high",
    "others": "its start or teacher was trained with labels of this data set, none of them held out here",
    "other data": "its start or teacher was trained with labels of other data",
}


@dataclass(frozen=True)
class Line:
    """A row of the table: an entry on so many labels, over its seeds.

    Attributes:
        entry: its name.
        labels: of each class.
        mode: how it was measured.
        rows: one for each seed.
        gap: to the reference with the same labels and mode; None for the reference itself, or without one.
    """

    entry: str
    labels: Labels
    mode: str
    rows: tuple[Row, ...]
    gap: Gap | None

    @property
    def title(self) -> str:
        """Its name as tables show it: with who trained its start, if others did."""
        return title_of(self.rows[0].cell.entry)

    @property
    def origin(self) -> str | None:
        """Who trained its start, if others did."""
        return origin_of(self.rows[0].cell.entry.start)

    @property
    def notes(self) -> list[str]:
        """Returns what a reader must know of this row: the config's note, and which labels its start has seen."""
        own, seen = (
            self.rows[0].cell.entry.note,
            {row.values.get("labels_seen_by_start") for row in self.rows},
        )
        unknown = f"{self.origin}: which images and labels they were is not known" if self.origin else ""
        several = any((row.values.get("test_reads") or 1) > 1 for row in self.rows)
        more = (
            "test images were read more than once, for weights of several lengths of the run"
            if several
            else ""
        )
        return [
            note for note in (own, unknown, *(_SEEN[what] for what in _SEEN if what in seen), more) if note
        ]

    @property
    def by_mode(self) -> str:
        """How the result came about, where no whole network was trained: " by knn"."""
        return "" if self.mode in TUNED_BY else f" by {self.mode}"

    @property
    def size(self) -> int:
        """Labeled images at hand, see `Row.size`."""
        return self.rows[0].size

    def gap_to(self, other: Line) -> Gap | None:
        """By how much this line's accuracy exceeds another's; None where no seed is in both."""
        return gap_between([row.scores for row in self.rows], [row.scores for row in other.rows])

    @property
    def metric(self) -> str:
        """The column that lines are compared by."""
        return self.rows[0].metric

    @property
    def segments(self) -> bool:
        """Whether masks were predicted."""
        return self.rows[0].overlaps is not None

    @property
    def score(self) -> float | None:
        """Mean of `metric` over seeds; None where it was not measured."""
        return self.mean(self.metric)

    def mean(self, column: str) -> float | None:
        """Mean over seeds; None where it was not measured."""
        values = self._values(column)
        return float(np.mean(values)) if values else None

    def spread(self, column: str) -> float | None:
        """Standard deviation over seeds; None for less than two."""
        values = self._values(column)
        return float(np.std(values, ddof=1)) if len(values) > 1 else None

    def _values(self, column: str) -> list[float]:
        return [float(row.values[column]) for row in self.rows if row.values.get(column) is not None]


def lines_of(config: CompareConfig, rows: Sequence[Row]) -> list[Line]:
    """Puts the table together, in the config's order."""
    groups = group(rows)
    lines = []
    for (entry, labels, mode), several in groups.items():
        others = groups.get((config.reference, labels, mode))
        gap = None
        if others and entry != config.reference:
            gap = gap_between([row.scores for row in several], [row.scores for row in others])
        lines.append(Line(entry, labels, mode, tuple(several), gap))
    return lines


def notes_of(lines: Sequence[Line]) -> list[str]:
    """Returns the notes of all rows, once for each entry."""
    return list(dict.fromkeys(f"{line.entry}: {'; '.join(line.notes)}." for line in lines if line.notes))


def at_most_labels(config: CompareConfig, lines: Sequence[Line]) -> list[Line]:
    """Takes the lines of one mode where the reference has most labels: of whole networks, else of its first mode."""
    of_reference = [line for line in lines if line.entry == config.reference] or list(lines)
    modes = [line.mode for line in of_reference]
    mode = next((mode for mode in modes if mode in TUNED_BY), modes[0] if modes else None)
    tuned = [line for line in lines if line.mode == mode]
    sizes = [line.size for line in tuned if line.entry == config.reference] or [line.size for line in tuned]
    return [line for line in tuned if line.size == max(sizes)]
