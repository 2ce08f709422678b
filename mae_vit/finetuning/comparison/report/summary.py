"""The lines of a comparison's table, each an entry with its results over seeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mae_vit.finetuning.comparison.config import TUNED_BY, CompareConfig, Labels
from mae_vit.finetuning.comparison.report.rows import Row, group, row_title
from mae_vit.finetuning.comparison.report.significance import Gap, gap_between
from mae_vit.weights.names import origin_of

# Notes by a run's `labels_seen_by_start`, worst first.
_SEEN = {
    "held-out": "its weights or teacher were trained with the held-out labels, so its held-out accuracy is too high",
    "others": "its weights or teacher were trained with labels of this data set, none of them held out here",
    "other data": "its weights or teacher were trained with labels of other data",
}
_READ_AGAIN = "test images were read more than once, for weights of several lengths of the run"


@dataclass(frozen=True)
class Line:
    """A line of the table: an entry's results over seeds, for one mode and number of labels.

    Attributes:
        entry: name of the entry.
        labels: number of labels of each class.
        mode: how it was measured.
        rows: results, one for each seed.
        gap: difference from the reference with the same labels and mode; None for or without the reference.
    """

    entry: str
    labels: Labels
    mode: str
    rows: tuple[Row, ...]
    gap: Gap | None

    @property
    def title(self) -> str:
        """The entry's name for tables, with the origin of third-party weights."""
        return row_title(self.rows[0].cell.entry)

    @property
    def weights(self) -> str | None:
        """The pretrained weights; None for scratch."""
        return self.rows[0].cell.entry.start

    @property
    def unlabeled(self) -> bool:
        """Whether it has pretrained weights that, as far as known, have seen no labels."""
        return self.weights is not None and not any(
            row.values.get("labels_seen_by_start") for row in self.rows
        )

    @property
    def notes(self) -> list[str]:
        """Caveats for readers: the config's note, labels that its weights have seen, repeated test reads."""
        seen, origin = {row.values.get("labels_seen_by_start") for row in self.rows}, origin_of(self.weights)
        notes = [
            self.rows[0].cell.entry.note,
            f"{origin}: which images and labels they were is not known" if origin else "",
            *(note for overlap, note in _SEEN.items() if overlap in seen),
            _READ_AGAIN if any((row.values.get("test_reads") or 1) > 1 for row in self.rows) else "",
        ]
        return [note for note in notes if note]

    @property
    def size(self) -> int:
        """Number of labeled images, see `Row.size`."""
        return self.rows[0].size

    def gap_to(self, other: Line) -> Gap | None:
        """Returns how far this line's score exceeds another's, see `gap_between`."""
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
        """Standard deviation over seeds; None for fewer than two."""
        values = self._values(column)
        return float(np.std(values, ddof=1)) if len(values) > 1 else None

    def _values(self, column: str) -> list[float]:
        return [float(row.values[column]) for row in self.rows if row.values.get(column) is not None]


def table_lines(config: CompareConfig, rows: Sequence[Row]) -> list[Line]:
    """Builds the table's lines, in the config's order."""
    groups = group(rows)
    lines = []
    for (entry, labels, mode), several in groups.items():
        line = Line(entry, labels, mode, tuple(several), None)
        reference = groups.get((config.reference, labels, mode))
        if reference and entry != config.reference:
            gap = line.gap_to(Line(config.reference, labels, mode, tuple(reference), None))
            line = Line(entry, labels, mode, tuple(several), gap)
        lines.append(line)
    return lines


def collect_notes(lines: Sequence[Line]) -> list[str]:
    """Returns the notes of all rows, once for each entry."""
    return list(dict.fromkeys(f"{line.entry}: {'; '.join(line.notes)}." for line in lines if line.notes))


def at_most_labels(config: CompareConfig, lines: Sequence[Line]) -> list[Line]:
    """Takes the lines with the reference's most labels, in a mode of whole networks, else in its first mode."""
    reference = [line for line in lines if line.entry == config.reference] or list(lines)
    modes = [line.mode for line in reference]
    mode = next((mode for mode in modes if mode in TUNED_BY), modes[0] if modes else None)
    size = max((line.size for line in reference if line.mode == mode), default=0)
    return [line for line in lines if (line.mode, line.size) == (mode, size)]
