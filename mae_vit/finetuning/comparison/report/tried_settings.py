"""The settings of each entry, and those that were tried for it."""

from __future__ import annotations

from itertools import zip_longest

from mae_vit.core.messages import format_decimal
from mae_vit.finetuning.comparison.config import TUNED_BY, Overrides
from mae_vit.finetuning.comparison.plan import ComparisonPlan
from mae_vit.finetuning.comparison.report.rows import title_of
from mae_vit.finetuning.comparison.settings import lines_of


def settings_table(plan: ComparisonPlan) -> tuple[list[str], list[list[str]]]:
    """Returns head and lines: one for each setting that was tried, with its score on held-out images."""
    body = []
    for entry, labels, mode in plan.rows():
        own = _as_text(plan.distinguishing_settings(entry, mode, {}))
        choice = plan.choice(entry, labels, mode)
        if mode not in TUNED_BY or entry.compute_of is not None:
            more = f", as much compute as {entry.compute_of}" if entry.compute_of else ""
            body.append([title_of(entry), f"{labels}, {mode}", own + more, "", ""])
            continue
        scores, best = (choice.scores(), choice.best()) if choice else ([], None)
        for point, score in zip_longest(choice.settings if choice else [{}], scores):
            shown = format_decimal(100 * score) if score is not None else "not finished" if scores else ""
            chosen = "chosen" if scores and point == best else ""
            body.append(
                [entry.name, str(labels), ", ".join(filter(None, (own, _as_text(point)))), shown, chosen]
            )
    return ["entry", "labels / class", "settings", "held-out %", ""], body


def settings_of_all(plan: ComparisonPlan) -> str:
    """Returns the settings that all entries share."""
    return f"All: {_as_text(plan.config.set) or 'as their configs have it'}."


def _as_text(settings: Overrides) -> str:
    return ", ".join(lines_of(settings))
