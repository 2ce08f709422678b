"""Charts of a comparison."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from markupsafe import Markup
from matplotlib.ticker import LogFormatterSciNotation, LogLocator

from mae_vit.comparison.config import TUNED_BY
from mae_vit.comparison.report.summary import Line
from mae_vit.core.messages import format_decimal
from mae_vit.pages import charts

_MARKERS = "osD^vPX*<"


def _style(line: Line) -> dict[str, Any]:
    """Returns matplotlib's color and marker of an entry, the same on every chart."""
    colors, number = charts.COLORS, line.number
    return {"color": colors[number % len(colors)], "marker": _MARKERS[number % len(_MARKERS)]}


def curves(lines: Sequence[Line], labels: object) -> Markup | None:
    """Draws validation accuracy against epochs: mean over seeds, and the range between them."""
    tuned = [line for line in lines if line.labels == labels and line.mode in TUNED_BY]
    shown = [line for line in tuned if all(row.curve for row in line.rows)]
    if not shown:
        return None
    with charts.chart("epoch", f"validation {_metric(lines)}, %") as (figure, axes):
        for line in shown:
            epochs = [epoch for epoch, _ in line.rows[0].curve]
            values = 100 * np.array(
                [[score for _, score in row.curve] for row in line.rows if len(row.curve) == len(epochs)]
            )
            color = _style(line)["color"]
            axes.plot(epochs, values.mean(axis=0), label=charts.plain(line.entry), color=color, linewidth=1.6)
            low, high = values.min(axis=0), values.max(axis=0)
            axes.fill_between(epochs, low, high, color=color, alpha=0.15, linewidth=0)
        charts.legend_below(figure)
        return charts.to_svg(figure)


def bars(lines: Sequence[Line]) -> Markup | None:
    """Draws the test accuracy of entries as bars, with a dot for each seed; None without entries.

    Names stand above the bars: beside them, long ones would leave no room on a narrow screen. The axis ends at the
    largest value; a mark on each bar is chance.
    """
    if not lines:
        return None
    chance, most = lines[0].chance, max(_scores(line).max() for line in lines)
    height = 0.62 * (len(lines) + (chance is not None)) + 0.6
    with charts.chart(f"test {_metric(lines)}, %", "", width=6.2, height=height) as (figure, axes):
        for number, line in enumerate(lines):
            scores, color = _scores(line), _style(line)["color"]
            axes.barh(number, scores.mean(), height=0.34, color=color, alpha=0.4)
            if len(scores) > 1:
                axes.plot(scores, np.full(len(scores), number), "o", color=color, markersize=5)
            label = f"{charts.plain(line.title)}: {format_decimal(scores.mean())} %"
            place = axes.get_yaxis_transform()
            axes.text(0.005, number - 0.24, label, va="bottom", fontsize=11, transform=place)
        if chance is not None:
            most, rows = max(most, 100 * chance), np.arange(len(lines))
            named = f"chance: {format_decimal(100 * chance)} %"
            style: dict[str, Any] = {"colors": charts.INK, "linewidth": 1.6, "label": named}
            axes.vlines(np.full(len(lines), 100 * chance), rows - 0.17, rows + 0.17, **style)
            charts.legend_below(figure)
        axes.set_xlim(0, min(100.0, 1.04 * most) or 1.0)
        axes.set_ylim(len(lines) - 0.5, -0.75)
        axes.set_yticks([])
        axes.grid(visible=False, axis="y")
        return charts.to_svg(figure)


def against_labels(lines: Sequence[Line]) -> Markup | None:
    """Draws test accuracy against labels; None for a single number of labels."""
    points = [(float(line.size), line) for line in lines if line.mode in TUNED_BY]
    if len({size for size, _ in points}) < 2:
        return None
    return _against(points, "labeled images", chance=points[0][1].chance)


def against_compute(lines: Sequence[Line]) -> Markup | None:
    """Draws test accuracy against FLOPs of pretraining and fine-tuning together, where both are known."""
    points = []
    for line in (line for line in lines if line.mode in TUNED_BY):
        before, own = (line.rows[0].values[f"{what}_flops"] for what in ("pretrain", "finetune"))
        if before is not None:
            points.append((float(own + before), line))
    return _against(points, "model FLOPs, pretraining and fine-tuning") if points else None


def _against(points: Sequence[tuple[float, Line]], horizontal: str, *, chance: float | None = None) -> Markup:
    """Draws each entry's mean scores, with the range over seeds, at positions on a logarithmic axis."""
    entries = list(dict.fromkeys(line.entry for _, line in points))
    with charts.chart(horizontal, f"test {_metric([line for _, line in points])}, %") as (figure, axes):
        for entry in entries:
            own = sorted((x for x in points if x[1].entry == entry), key=lambda point: point[0])
            style, scores = _style(own[0][1]), [(x, _scores(line)) for x, line in own]
            means = [values.mean() for _, values in scores]
            label = charts.plain(entry)
            axes.plot([x for x, _ in own], means, label=label, linewidth=1.4, markersize=6, **style)
            for x, values in scores:
                axes.plot([x, x], [values.min(), values.max()], color=style["color"], linewidth=1)
        if chance is not None:
            named = f"chance: {format_decimal(100 * chance)} %"
            axes.axhline(100 * chance, color=charts.INK, linewidth=1, linestyle="dashed", label=named)
        axes.set_xscale("log")
        # By default labels of 2, 3, 4, 6 times a power overlap.
        axes.xaxis.set_minor_locator(LogLocator(subs=(2.0, 5.0)))
        axes.xaxis.set_minor_formatter(LogFormatterSciNotation(minor_thresholds=(2, 2)))
        charts.legend_below(figure)
        return charts.to_svg(figure)


def _scores(line: Line) -> np.ndarray:
    return np.array([100 * row.score for row in line.rows])


def _metric(lines: Sequence[Line]) -> str:
    return "mIoU" if lines and lines[0].segments else "top-1"
