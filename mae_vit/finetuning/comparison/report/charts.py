"""Charts of a comparison, as SVG that takes its text color from the page it stands in."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np

from mae_vit.finetuning.comparison.report.rows import Row, group

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

# Stands for the page's own text color, light or dark.
_INK = "#010203"
# Okabe and Ito's colors, which color-blind people tell apart; readable on white and on black.
_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6d31", "#7f7f7f", "#b2182b")
_MARKERS = "osD^vPX*<"
_STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "mae-vit",
    "text.color": _INK,
    "axes.edgecolor": _INK,
    "axes.labelcolor": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "legend.frameon": False,
    "font.size": 11,
}


class Palette:
    """One color and marker for each entry, on every chart."""

    def __init__(self, entries: Sequence[str]) -> None:
        """Gives them out in order."""
        self._places = {name: place for place, name in enumerate(entries)}

    def of(self, entry: str) -> dict[str, Any]:
        """Matplotlib's options of an entry."""
        place = self._places[entry]
        return {"color": _COLORS[place % len(_COLORS)], "marker": _MARKERS[place % len(_MARKERS)]}


def curves(rows: Sequence[Row], palette: Palette, labels: object) -> str | None:
    """Draws held-out accuracy against epochs: mean over seeds, and the range between them."""
    with plt.rc_context(_STYLE):
        figure, axes = _figure("epoch", "held-out top-1, %")
        drawn = False
        for (entry, count, mode), several in group(rows).items():
            if count != labels or mode != "finetune" or not all(row.curve for row in several):
                continue
            epochs = np.array([point[0] for point in several[0].curve])
            values = 100 * np.array(
                [[point[1] for point in row.curve] for row in several if len(row.curve) == len(epochs)]
            )
            look = palette.of(entry)
            axes.plot(epochs, values.mean(axis=0), label=entry, color=look["color"], linewidth=1.6)
            axes.fill_between(
                epochs, values.min(axis=0), values.max(axis=0), color=look["color"], alpha=0.15, linewidth=0
            )
            drawn = True
        return _finish(figure, axes) if drawn else None


def against_labels(rows: Sequence[Row], palette: Palette) -> str | None:
    """Draws test accuracy against labels for each class; None with one number of labels."""
    found = group(rows)
    sizes = {row.size for row in rows if row.cell.mode == "finetune"}
    if len(sizes) < 2:
        return None
    with plt.rc_context(_STYLE):
        figure, axes = _figure("labeled images", "test top-1, %")
        for entry in dict.fromkeys(name for name, _, _ in found):
            points = [
                (several[0].size, _scores(several))
                for (name, _, mode), several in found.items()
                if name == entry and mode == "finetune"
            ]
            points.sort(key=lambda point: point[0])
            _line(axes, points, palette, entry)
        axes.set_xscale("log")
        return _finish(figure, axes)


def against_compute(rows: Sequence[Row], palette: Palette) -> str | None:
    """Draws test accuracy against FLOPs of pretraining and fine-tuning together."""
    found = [item for item in group(rows).items() if item[0][2] == "finetune"]
    if not found:
        return None
    with plt.rc_context(_STYLE):
        figure, axes = _figure("model FLOPs, pretraining and fine-tuning", "test top-1, %")
        for entry in dict.fromkeys(name for (name, _, _), _ in found):
            points = [
                (several[0].values["finetune_flops"] + several[0].values["pretrain_flops"], _scores(several))
                for (name, _, _), several in found
                if name == entry and several[0].values["pretrain_flops"] is not None
            ]
            if points:  # not of a start whose cost nobody knows
                _line(axes, sorted(points, key=lambda point: point[0]), palette, entry)
        axes.set_xscale("log")
        return _finish(figure, axes)


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
    return np.array([100 * row.values["test_top1"] for row in rows])


def _line(axes: Axes, points: Sequence[tuple[float, np.ndarray]], palette: Palette, entry: str) -> None:
    look = palette.of(entry)
    at = [x for x, _ in points]
    axes.plot(at, [scores.mean() for _, scores in points], label=entry, linewidth=1.4, markersize=6, **look)
    for x, scores in points:
        axes.plot([x, x], [scores.min(), scores.max()], color=look["color"], linewidth=1)


def _figure(horizontal: str, vertical: str) -> tuple[Figure, Axes]:
    figure, axes = plt.subplots(figsize=(6.2, 3.7))
    axes.set_xlabel(horizontal)
    axes.set_ylabel(vertical)
    axes.grid(alpha=0.2)
    return figure, axes


def _finish(figure: Figure, axes: Axes) -> str:
    """Legend below, so that no line is hidden; ids and dates that differ by run are taken out."""
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.18), ncol=2, fontsize=10)
    stream = io.StringIO()
    figure.savefig(stream, format="svg", bbox_inches="tight", metadata={"Date": None})
    plt.close(figure)
    svg = stream.getvalue()
    svg = svg[svg.index("<svg") :].replace(_INK, "currentColor")
    # The page sets the size: the view box stays.
    return re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg))
