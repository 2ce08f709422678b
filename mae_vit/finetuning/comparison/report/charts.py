"""Charts of a comparison."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from markupsafe import Markup

from mae_vit.core.messages import format_decimal
from mae_vit.finetuning.comparison.config import TUNED_BY
from mae_vit.finetuning.comparison.report.rows import Row, group, row_title
from mae_vit.pages import charts

_MARKERS = "osD^vPX*<"


class Palette:
    """One color and marker for each entry, on every chart."""

    def __init__(self, entries: Sequence[str]) -> None:
        """Assigns them in order."""
        self._numbers = {name: number for number, name in enumerate(entries)}

    def style(self, entry: str) -> dict[str, Any]:
        """Returns an entry's matplotlib options."""
        number = self._numbers[entry]
        return {
            "color": charts.COLORS[number % len(charts.COLORS)],
            "marker": _MARKERS[number % len(_MARKERS)],
        }


def curves(rows: Sequence[Row], palette: Palette, labels: object) -> Markup | None:
    """Draws held-out accuracy against epochs: mean over seeds, and the range between them."""
    shown = {
        entry: several
        for (entry, count, mode), several in group(rows).items()
        if count == labels and mode in TUNED_BY and all(row.curve for row in several)
    }
    if not shown:
        return None
    with charts.chart("epoch", f"held-out {_metric(rows)}, %") as (figure, axes):
        for entry, several in shown.items():
            epochs = [epoch for epoch, _ in several[0].curve]
            values = 100 * np.array(
                [[score for _, score in row.curve] for row in several if len(row.curve) == len(epochs)]
            )
            color = palette.style(entry)["color"]
            axes.plot(epochs, values.mean(axis=0), label=charts.plain(entry), color=color, linewidth=1.6)
            low, high = values.min(axis=0), values.max(axis=0)
            axes.fill_between(epochs, low, high, color=color, alpha=0.15, linewidth=0)
        charts.legend_below(axes)
        return charts.to_svg(figure)


def bars(entries: Sequence[tuple[str, Sequence[Row]]], palette: Palette) -> Markup | None:
    """Draws the test accuracy of entries as bars, with a dot for each seed; None without entries.

    Names stand above the bars: beside them, long ones would leave no room on a narrow screen.
    """
    if not entries:
        return None
    measured = f"test {_metric(entries[0][1])}, %"
    with charts.chart(measured, "", width=5.4, height=0.62 * len(entries) + 0.6) as (figure, axes):
        for number, (entry, several) in enumerate(entries):
            scores, color = _scores(several), palette.style(entry)["color"]
            axes.barh(number, scores.mean(), height=0.34, color=color, alpha=0.75)
            if len(scores) > 1:
                axes.plot(scores, np.full(len(scores), number), "o", color=color, markersize=4)
            label = f"{charts.plain(row_title(several[0].cell.entry))}: {format_decimal(scores.mean())} %"
            axes.text(0.5, number - 0.24, label, va="bottom", fontsize=11)
        axes.set_xlim(0, 100)
        axes.set_ylim(len(entries) - 0.5, -0.75)
        axes.set_yticks([])
        axes.grid(visible=False, axis="y")
        return charts.to_svg(figure)


def against_labels(rows: Sequence[Row], palette: Palette) -> Markup | None:
    """Draws test accuracy against labels; None for a single number of labels."""
    if len({row.size for row in rows if row.cell.mode in TUNED_BY}) < 2:
        return None
    return _against(rows, palette, "labeled images", lambda row: row.size)


def against_compute(rows: Sequence[Row], palette: Palette) -> Markup | None:
    """Draws test accuracy against FLOPs of pretraining and fine-tuning together."""

    def total(row: Row) -> float | None:  # None for weights of unknown cost
        before = row.values["pretrain_flops"]
        return None if before is None else float(row.values["finetune_flops"] + before)

    return _against(rows, palette, "model FLOPs, pretraining and fine-tuning", total)


def _against(
    rows: Sequence[Row], palette: Palette, horizontal: str, position: Callable[[Row], float | None]
) -> Markup | None:
    """Draws a line for each entry through its mean scores, with the range over seeds, on a logarithmic axis."""
    points: dict[str, list[tuple[float, np.ndarray]]] = {}
    for (entry, _, mode), several in group(rows).items():
        if mode in TUNED_BY:
            x = position(several[0])
            points.setdefault(entry, []).extend([] if x is None else [(x, _scores(several))])
    if not points:
        return None
    with charts.chart(horizontal, f"test {_metric(rows)}, %") as (figure, axes):
        for entry, unsorted in points.items():
            if not unsorted:
                continue
            line, style = sorted(unsorted, key=lambda point: point[0]), palette.style(entry)
            positions, means = [x for x, _ in line], [scores.mean() for _, scores in line]
            label = charts.plain(entry)
            axes.plot(positions, means, label=label, linewidth=1.4, markersize=6, **style)
            for x, scores in line:
                axes.plot([x, x], [scores.min(), scores.max()], color=style["color"], linewidth=1)
        axes.set_xscale("log")
        charts.legend_below(axes)
        return charts.to_svg(figure)


def _scores(rows: Sequence[Row]) -> np.ndarray:
    return np.array([100 * row.score for row in rows])


def _metric(rows: Sequence[Row]) -> str:
    return "top-1" if not rows or rows[0].overlaps is None else "mIoU"
