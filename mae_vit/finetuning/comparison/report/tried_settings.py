"""The settings of each entry, and those that were tried for it."""

from __future__ import annotations

from itertools import zip_longest

from mae_vit.core.messages import format_decimal
from mae_vit.finetuning.comparison.config import TUNED_BY, Overrides
from mae_vit.finetuning.comparison.matrix.matrix import Matrix
from mae_vit.finetuning.comparison.matrix.settings import lines_of
from mae_vit.finetuning.comparison.report.rows import title_of


def settings_table(matrix: Matrix) -> tuple[list[str], list[list[str]]]:
    """Returns head and lines: one for each setting that was tried, with its score on held-out images."""
    body = []
    for entry, labels, mode in matrix.rows():
        own = _as_text(matrix.distinguishing_settings(entry, mode, {}))
        if mode not in TUNED_BY or entry.compute_of is not None:
            more = f", as much compute as {entry.compute_of}" if entry.compute_of else ""
            body.append([title_of(entry), f"{labels}, {mode}", own + more, "", ""])
            continue
        point, scores = matrix.chosen(entry, labels)
        points = matrix.config.tuning_settings(entry) or [{}]
        for other, score in zip_longest(points, scores):
            shown = "" if score is None else format_decimal(100 * score) if score >= 0 else "not finished"
            chosen = "chosen" if min(scores, default=-1) >= 0 and other == point else ""
            body.append(
                [entry.name, str(labels), ", ".join(filter(None, (own, _as_text(other)))), shown, chosen]
            )
    return ["entry", "labels / class", "settings", "held-out %", ""], body


def settings_of_all(matrix: Matrix) -> str:
    """Returns the settings that all entries share."""
    return f"All: {_as_text(matrix.config.set) or 'as their configs have it'}."


def _as_text(settings: Overrides) -> str:
    return ", ".join(lines_of(settings))
