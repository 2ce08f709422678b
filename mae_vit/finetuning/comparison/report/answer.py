"""The first screen of a comparison's report: the answer in one sentence, and one chart."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from markupsafe import Markup

from mae_vit.core.messages import count_of, format_decimal
from mae_vit.finetuning.comparison.config import TUNED_BY, CompareConfig
from mae_vit.finetuning.comparison.report import charts
from mae_vit.finetuning.comparison.report.rows import Row
from mae_vit.finetuning.comparison.report.significance import Gap
from mae_vit.finetuning.comparison.report.summary import Line, at_most_labels
from mae_vit.weights.names import origin_of

# Two entries are level if the interval of their difference lies within this many points of zero.
LEVEL_POINTS = 3.0


def answer(config: CompareConfig, lines: Sequence[Line]) -> str:
    """Says in one sentence what pretraining without labels is worth here.

    It compares the best entry whose weights have seen no labels (else the best with weights, then any, third-party
    encoders last) with the reference, the best entry from scratch, and the best entry that is clearly better.
    """
    scored = [line for line in at_most_labels(config, lines) if line.score is not None]
    reference = next((line for line in scored if line.entry == config.reference), None)
    others = [line for line in scored if line is not reference]
    own = [line for line in others if origin_of(line.weights) is None]
    subject = (
        _best(line for line in own if line.unlabeled)
        or _best(line for line in own if line.weights)
        or _best(own)
        or _best(others)
    )
    if reference is None or subject is None:
        return f"Not finished yet: {config.reference} and a row to compare it with."
    gap = subject.gap_to(reference)
    parts = [_against(gap, reference)]
    rest = [line for line in others if line is not subject]
    rival = _best(line for line in rest if not line.weights) if subject.weights else None
    if rival is not None:
        parts.append(_against(subject.gap_to(rival), rival, ", the best without pretraining"))
    noun, mode = "mask" if subject.segments else "label", subject.mode
    text = f"With {count_of(subject.size, noun)}, {subject.title} reaches {_percent(subject)}"
    text += f"{'' if mode in TUNED_BY else f' by {mode}'}, {' and '.join(parts)}"
    better = _best(line for line in rest if line is not rival and _is_clearly_above(line, subject))
    if better is not None:
        text += f"; {better.title} is better still, at {_percent(better)}"
        if better.weights and origin_of(better.weights) is None and not better.unlabeled:
            text += ", from weights that have seen labels"
    seeds = gap.seeds if gap is not None else len(subject.rows)
    how = "one seed: intervals cover test images alone" if seeds == 1 else f"{seeds} seeds"
    return f"{text} ({how})."


def first_chart(
    config: CompareConfig, rows: Sequence[Row], lines: Sequence[Line], palette: charts.Palette
) -> tuple[Markup, str] | None:
    """Draws accuracy against labels, or bars of the entries if there is one number of labels.

    Returns:
        The chart and its caption; None without results.
    """
    if drawn := charts.against_labels(rows, palette):
        return drawn, "Test images: mean over seeds, and the range between them."
    scored = [line for line in at_most_labels(config, lines) if line.score is not None]
    drawn = charts.bars([(line.entry, line.rows) for line in scored], palette)
    what = "Mean IoU" if scored and scored[0].segments else "Accuracy"
    return (drawn, f"{what} on test images: mean over seeds, a dot for each.") if drawn else None


def _best(lines: Iterable[Line]) -> Line | None:
    return max(lines, key=lambda line: line.score or 0, default=None)


def _is_clearly_above(line: Line, other: Line) -> bool:
    gap = line.gap_to(other)
    return gap is not None and gap.is_clear and gap.points > 0


def _against(gap: Gap | None, other: Line, what: str = "") -> str:
    """Words the gap to another row, hedged by its confidence interval."""
    name = f"{other.title} ({_percent(other)}{what})"
    if gap is None:
        return f"beside {name}, of other seeds or test images"
    if not gap.is_clear and abs(gap.points) + gap.half_width <= LEVEL_POINTS:
        return f"level with {name}"
    side = "above" if gap.points > 0 else "below"
    phrase = f"{format_decimal(abs(gap.points))} points {side} {name}"
    return phrase if gap.is_clear else f"{phrase}, which chance may explain"


def _percent(line: Line) -> str:
    return f"{format_decimal(100 * (line.score or 0))} %" + (" mIoU" if line.segments else "")
