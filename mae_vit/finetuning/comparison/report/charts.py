"""Charts of a comparison, as SVG that takes its text color from the page it stands in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from mae_vit.core.messages import format_decimal
from mae_vit.finetuning.comparison.config import TUNED_BY
from mae_vit.finetuning.comparison.report.rows import Row, group, title_of
from mae_vit.inspection.page import svg

_MARKERS = "osD^vPX*<"


class Palette:
    """One color and marker for each entry, on every chart."""

    def __init__(self, entries: Sequence[str]) -> None:
        """Gives them out in order."""
        self._places = {name: place for place, name in enumerate(entries)}

    def of(self, entry: str) -> dict[str, Any]:
        """Matplotlib's options of an entry."""
        place = self._places[entry]
        return {"color": svg.COLORS[place % len(svg.COLORS)], "marker": _MARKERS[place % len(_MARKERS)]}


def curves(rows: Sequence[Row], palette: Palette, labels: object) -> str | None:
    """Draws held-out accuracy against epochs: mean over seeds, and the range between them."""
    with svg.chart("epoch", f"held-out {_metric(rows)}, %") as (figure, axes):
        drawn = False
        for (entry, count, mode), several in group(rows).items():
            if count != labels or mode not in TUNED_BY or not all(row.curve for row in several):
                continue
            epochs = np.array([point[0] for point in several[0].curve])
            values = 100 * np.array(
                [[point[1] for point in row.curve] for row in several if len(row.curve) == len(epochs)]
            )
            look = palette.of(entry)
            axes.plot(epochs, values.mean(axis=0), label=svg.plain(entry), color=look["color"], linewidth=1.6)
            axes.fill_between(
                epochs, values.min(axis=0), values.max(axis=0), color=look["color"], alpha=0.15, linewidth=0
            )
            drawn = True
        if not drawn:
            return None
        svg.legend_below(axes)
        return svg.to_svg(figure)


def bars(entries: Sequence[tuple[str, Sequence[Row]]], palette: Palette) -> str | None:
    """Draws the test accuracy of entries as bars, with a dot for each seed; None without entries.

    Names stand over the bars: beside them, long ones would leave the bars no room on a narrow screen.
    """
    if not entries:
        return None
    measured = f"test {_metric(entries[0][1])}, %"
    with svg.chart(measured, "", width=5.4, height=0.62 * len(entries) + 0.6) as (figure, axes):
        for place, (entry, several) in enumerate(entries):
            scores, color = _scores(several), palette.of(entry)["color"]
            axes.barh(place, scores.mean(), height=0.34, color=color, alpha=0.75)
            if len(scores) > 1:
                axes.plot(scores, np.full(len(scores), place), "o", color=color, markersize=4)
            label = f"{svg.plain(title_of(several[0].cell.entry))}: {format_decimal(scores.mean())} %"
            axes.text(0.5, place - 0.24, label, va="bottom", fontsize=11)
        axes.set_xlim(0, 100)
        axes.set_ylim(len(entries) - 0.5, -0.75)
        axes.set_yticks([])
        axes.grid(visible=False, axis="y")
        return svg.to_svg(figure)


def against_labels(rows: Sequence[Row], palette: Palette) -> str | None:
    """Draws test accuracy against labels for each class; None with one number of labels."""
    found = group(rows)
    sizes = {row.size for row in rows if row.cell.mode in TUNED_BY}
    if len(sizes) < 2:
        return None
    with svg.chart("labeled images", f"test {_metric(rows)}, %") as (figure, axes):
        for entry in dict.fromkeys(name for name, _, _ in found):
            points = [
                (several[0].size, _scores(several))
                for (name, _, mode), several in found.items()
                if name == entry and mode in TUNED_BY
            ]
            points.sort(key=lambda point: point[0])
            _line(axes, points, palette, entry)
        axes.set_xscale("log")
        svg.legend_below(axes)
        return svg.to_svg(figure)


def against_compute(rows: Sequence[Row], palette: Palette) -> str | None:
    """Draws test accuracy against FLOPs of pretraining and fine-tuning together."""
    found = [item for item in group(rows).items() if item[0][2] in TUNED_BY]
    if not found:
        return None
    measured = f"test {_metric(rows)}, %"
    with svg.chart("model FLOPs, pretraining and fine-tuning", measured) as (figure, axes):
        for entry in dict.fromkeys(name for (name, _, _), _ in found):
            points = [
                (several[0].values["finetune_flops"] + several[0].values["pretrain_flops"], _scores(several))
                for (name, _, _), several in found
                if name == entry and several[0].values["pretrain_flops"] is not None
            ]
            if points:  # not of a start whose cost nobody knows
                _line(axes, sorted(points, key=lambda point: point[0]), palette, entry)
        axes.set_xscale("log")
        svg.legend_below(axes)
        return svg.to_svg(figure)


def crossings(points: Sequence[tuple[float, float]], others: Sequence[tuple[float, float]]) -> list[float]:
    """Finds where one line crosses another, over the logarithm of what they share.

    Args:
        points: (labels, accuracy), sorted by labels.
        others: the same for another entry.

    Returns:
        Labels at which the better one changes, interpolated.
    """
    shared = sorted({x for x, _ in points} & {x for x, _ in others})
    gaps = [dict(points)[x] - dict(others)[x] for x in shared]
    found = []
    for (x, gap), (next_x, next_gap) in zip(
        zip(shared, gaps, strict=True), zip(shared[1:], gaps[1:], strict=True), strict=False
    ):
        if gap * next_gap < 0:
            share = gap / (gap - next_gap)
            found.append(float(np.exp(np.log(x) + share * (np.log(next_x) - np.log(x)))))
    return found


def _scores(rows: Sequence[Row]) -> np.ndarray:
    return np.array([100 * row.score for row in rows])


def _metric(rows: Sequence[Row]) -> str:
    return "top-1" if not rows or rows[0].overlaps is None else "mIoU"


def _line(axes: Axes, points: Sequence[tuple[float, np.ndarray]], palette: Palette, entry: str) -> None:
    look = palette.of(entry)
    at = [x for x, _ in points]
    axes.plot(
        at,
        [scores.mean() for _, scores in points],
        label=svg.plain(entry),
        linewidth=1.4,
        markersize=6,
        **look,
    )
    for x, scores in points:
        axes.plot([x, x], [scores.min(), scores.max()], color=look["color"], linewidth=1)
