"""A comparison's table, a line for each entry with its results over seeds; and its answer, in one sentence."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from mae_vit.comparison.config import TUNED_BY, CompareConfig, Labels
from mae_vit.comparison.report.rows import Row, row_title
from mae_vit.comparison.report.significance import Gap, gap_between
from mae_vit.core.messages import count_of, format_decimal
from mae_vit.weights.names import origin_of

# Two entries are level if the interval of their difference lies within this many points of zero.
LEVEL_POINTS = 3.0
# Notes by a run's `labels_seen_by_start`, worst first.
_SEEN = {
    "held-out": "its weights were trained with the labels of validation images, so its accuracy on them is too high",
    "others": "its weights were trained with other labels of this data set",
    "other data": "its weights were trained with labels of other data",
}
_READ_AGAIN = "test images were read more than once, for weights of several lengths of the run"


@dataclass(frozen=True)
class Line:
    """A line of the table: an entry's results over seeds, for one mode and number of labels.

    Attributes:
        number: the entry's place in the config.
        rows: results, one for each seed.
        gap: difference from the reference with the same labels and mode; None for or without the reference.
    """

    entry: str
    number: int
    labels: Labels
    mode: str
    rows: tuple[Row, ...]
    gap: Gap | None

    @property
    def title(self) -> str:
        """The entry's name for tables, with the origin of third-party weights."""
        return row_title(self.rows[0].cell.entry, self.origin)

    @property
    def origin(self) -> str | None:
        """Who trained third-party weights."""
        return self.rows[0].values.get("start_origin") or origin_of(self.weights)

    @property
    def weights(self) -> str | None:
        """The pretrained weights; None for scratch."""
        return self.rows[0].cell.entry.start

    @property
    def size(self) -> int:
        """Number of labeled images, see `Row.size`."""
        return self.rows[0].size

    @property
    def metric(self) -> str:
        """The column that lines are compared by."""
        return self.rows[0].metric

    @property
    def segments(self) -> bool:
        """Whether masks were predicted."""
        return self.rows[0].overlaps is not None

    @property
    def chance(self) -> float | None:
        """Accuracy of always naming the most frequent class of the test images; None for masks."""
        truth = self.rows[0].truth
        return None if self.segments else float(np.unique(truth, return_counts=True)[1].max() / len(truth))

    @property
    def score(self) -> float | None:
        """Mean of `metric` over seeds; None where it was not measured."""
        return self.mean(self.metric)

    @property
    def unlabeled(self) -> bool:
        """Whether it has pretrained weights that, as far as known, have seen no labels."""
        return self.weights is not None and not any(self._seen)

    @property
    def notes(self) -> list[str]:
        """Caveats for readers: the config's note, labels that its weights have seen, repeated test reads."""
        notes = [
            self.rows[0].cell.entry.note,
            "weights of others, trained on images and labels that are not known" if self.origin else "",
            *(note for overlap, note in _SEEN.items() if overlap in self._seen),
            _READ_AGAIN if any((row.values.get("test_reads") or 1) > 1 for row in self.rows) else "",
        ]
        return [note for note in notes if note]

    @property
    def _seen(self) -> set[str | None]:
        return {row.values.get("labels_seen_by_start") for row in self.rows}

    def gap_to(self, other: Line) -> Gap | None:
        """Returns how far this line's score exceeds another's, see `gap_between`."""
        return gap_between([row.scores for row in self.rows], [row.scores for row in other.rows])

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
    names = [entry.name for entry in config.entries]
    groups: dict[tuple[str, Labels, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.cell.entry.name, row.cell.labels, row.cell.mode), []).append(row)
    lines = []
    for (entry, labels, mode), several in groups.items():
        reference, gap = groups.get((config.reference, labels, mode)), None
        if reference and entry != config.reference:
            gap = gap_between([row.scores for row in several], [row.scores for row in reference])
        lines.append(Line(entry, names.index(entry), labels, mode, tuple(several), gap))
    return lines


def collect_notes(lines: Sequence[Line]) -> list[str]:
    """Returns the notes of all rows, once for each entry; its image size too if another's differs."""
    sizes = [line.rows[0].values.get("img_size") for line in lines]
    notes = []
    for line, size in zip(lines, sizes, strict=True):
        if found := [*([f"images of {size} px"] if size and len({*sizes} - {None}) > 1 else []), *line.notes]:
            notes.append(f"{line.entry}: {'; '.join(found)}.")
    return list(dict.fromkeys(notes))


def at_most_labels(config: CompareConfig, lines: Sequence[Line]) -> list[Line]:
    """Takes the lines with the reference's most labels, in a mode of whole networks, else in its first mode."""
    reference = [line for line in lines if line.entry == config.reference] or list(lines)
    modes = [line.mode for line in reference]
    mode = next((mode for mode in modes if mode in TUNED_BY), modes[0] if modes else None)
    size = max((line.size for line in reference if line.mode == mode), default=0)
    return [line for line in lines if (line.mode, line.size) == (mode, size)]


def answer(config: CompareConfig, lines: Sequence[Line]) -> str:
    """Says in one sentence what pretraining without labels is worth here.

    It compares the best entry whose weights have seen no labels (else the best with weights, then any, third-party
    encoders last) with the reference, the best entry from scratch, and the best entry that is clearly better.
    """
    scored = [line for line in at_most_labels(config, lines) if line.score is not None]
    reference = next((line for line in scored if line.entry == config.reference), None)
    others = [line for line in scored if line is not reference]
    own = [line for line in others if line.origin is None]
    subject = (
        _best(line for line in own if line.unlabeled)
        or _best(line for line in own if line.weights)
        or _best(own)
        or _best(others)
    )
    if reference is not None and subject is None:
        rows = [entry for entry in config.entries if entry.name != config.reference]
        if not any(reference.mode in (entry.modes or config.modes) for entry in rows):
            like = " of its mode" if rows else ""
            return f"{reference.title} reaches {_percent(reference)}; there is no other row{like} to compare it with."
    if reference is None or subject is None:
        return f"Not finished yet: {config.reference} and a row to compare it with."
    gap = subject.gap_to(reference)
    parts = [_against(subject, reference)]
    rest = [line for line in others if line is not subject]
    rival = _best(line for line in rest if not line.weights) if subject.weights else None
    if rival is not None:
        # The reference may be better and have no pretraining either.
        is_best = bool(reference.weights) or (rival.score or 0) > (reference.score or 0)
        what = ", the best without pretraining" if is_best else ""
        parts.append(_against(subject, rival, what))
    noun, mode = "mask" if subject.segments else "label", subject.mode
    text = f"With {count_of(subject.size, noun)}, {subject.title} reaches {_percent(subject)}"
    text += f"{'' if mode in TUNED_BY else f' by {mode}'}, {' and '.join(parts)}"
    above_rival = (line for line in rest if rival is None or (line.score or 0) > (rival.score or 0))
    gaps = [(line, line.gap_to(subject)) for line in above_rival]
    better = _best(line for line, above in gaps if above and above.is_clear and above.points > 0)
    if better is not None:
        few = " (one seed)" if len(better.rows) == 1 < len(subject.rows) else ""
        text += f"; {better.title} is better still, at {_percent(better)}{few}"
        if better.weights and better.origin is None and not better.unlabeled:
            text += ", from weights that have seen labels"
    seeds = gap.seeds if gap is not None else len(subject.rows)
    how = "one seed, so intervals cover only the test images" if seeds == 1 else f"{seeds} seeds"
    return f"{text}; {how}."


def _best(lines: Iterable[Line]) -> Line | None:
    return max(lines, key=lambda line: line.score or 0, default=None)


def _against(line: Line, other: Line, what: str = "") -> str:
    """Words the gap of a row to another, hedged by its confidence interval."""
    name, gap = f"{other.title} ({_percent(other)}{what})", line.gap_to(other)
    if gap is None:
        return f"next to {name}, on other seeds or test images"
    if gap.seeds < max(len(line.rows), len(other.rows)):
        # Their means are of more seeds than the gap.
        name += f" in the {count_of(gap.seeds, 'seed')} that both have"
    if not gap.is_clear and abs(gap.points) + gap.half_width <= LEVEL_POINTS:
        return f"level with {name}"
    side = "above" if gap.points > 0 else "below"
    return (
        f"{format_decimal(abs(gap.points))} points{'' if gap.is_clear else ' (may be chance)'} {side} {name}"
    )


def _percent(line: Line) -> str:
    return f"{format_decimal(100 * (line.score or 0))} %" + (" mIoU" if line.segments else "")
