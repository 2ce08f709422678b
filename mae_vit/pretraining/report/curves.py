"""A run's curves as charts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.ticker import MaxNLocator

from mae_vit.inspection.page import svg
from mae_vit.pretraining.report.run_record import RunRecord
from mae_vit.pretraining.report.verdict import held_out_names, numbers, values_of

# Of more points a chart shows means and ranges: a page of a long run stays small.
_MOST_POINTS = 400
# A chart whose values span more decades has a logarithmic axis.
_LOG_SPAN = 100.0
# What a metric of held-out images says; others keep their names.
_TITLES = {
    "loss": "loss",
    "psnr_db": "predicted pixels, PSNR in dB (more is better)",
    "psnr_gain_db": "predicted pixels, dB above the mean color of each patch (0: no better)",
    "accuracy": "share named right",
    "rankme": "effective rank of features (RankMe; 1 after a collapse)",
    "feature_std": "standard deviation of features (0 after a collapse)",
}
_SECTIONS = {
    "lr": "learning rate",
    "grad_norm": "gradient norm",
    "images_per_s": "images per second",
    "data_wait_frac": "share of time waiting for data",
}


def draw_all(record: RunRecord) -> tuple[list[tuple[str, str]], ...]:
    """Draws every curve of a run.

    Returns:
        Charts (title, SVG): what was learned, then how the training went.
    """
    course = []
    for key, title in _SECTIONS.items():
        if points := _of_lines(record, key):
            course.append((title, _chart({"": points}, whole=False)))
    return list(_learned(record)), course


def _of_lines(record: RunRecord, key: str) -> list[tuple[int, float]]:
    return [(line["step"], value) for line in record.lines for value in numbers([line.get(key)])]


def _learned(record: RunRecord) -> Iterator[tuple[str, str]]:
    if losses := _of_lines(record, "loss"):
        yield "training loss", _chart({"": losses})
    for name in held_out_names(record.lines):
        points = values_of(record.lines, "heldout", name)
        # Of a constant (the baseline of held-out images) there is nothing to see.
        if len(points) == 1 or len({value for _, value in points}) > 1:
            yield f"held-out images: {_TITLES.get(name, name)}", _chart({"": points})
    scores = {
        name.removesuffix("_top1").replace("_", " "): points
        for name in held_out_names(record.lines, "probe")
        if name.endswith("top1") and (points := values_of(record.lines, "probe", name))
    }
    if scores:
        yield "online probe: share of other held-out images named right", _chart(scores)


def _chart(curves: Mapping[str, Sequence[tuple[int, float]]], *, whole: bool = True) -> str:
    """Draws curves of (step, value) points by name; `whole` axes reach zero, so that noise looks like noise."""
    with svg.chart("step", "", width=4.6, height=2.7) as (figure, axes):
        for place, (name, points) in enumerate(curves.items()):
            color = svg.COLORS[place % len(svg.COLORS)]
            steps, middle, low, high = thinned(np.array(points, np.float64))
            if len(steps) < len(points):
                axes.fill_between(steps, low, high, color=color, alpha=0.25, linewidth=0)
            marker = "o" if len(points) < 20 else None
            axes.plot(
                steps,
                middle,
                color=color,
                linewidth=1.4,
                marker=marker,
                markersize=3.5,
                label=svg.plain(name),
            )
        values = np.array([value for points in curves.values() for _, value in points])
        if values.min() > 0 and values.max() > _LOG_SPAN * values.min():
            axes.set_yscale("log")
        elif whole:
            bottom, top = axes.get_ylim()
            axes.set_ylim(bottom if values.min() < 0 else 0.0, max(0.0, top))
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
        if len(curves) > 1:
            svg.legend_below(axes, columns=2 if len(curves) < 3 else 3, gap=0.24)
        return svg.to_svg(figure)


def thinned(points: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Means and ranges of many points.

    Args:
        points: float (n, 2), step and value.

    Returns:
        Steps, means, lowest and highest values, each (m,): the points themselves if there are few.
    """
    if len(points) <= _MOST_POINTS:
        return points[:, 0], points[:, 1], points[:, 1], points[:, 1]
    parts = np.array_split(points, _MOST_POINTS)
    columns: list[Any] = [
        [part[-1, 0] for part in parts],
        [part[:, 1].mean() for part in parts],
        [part[:, 1].min() for part in parts],
        [part[:, 1].max() for part in parts],
    ]
    steps, middle, low, high = map(np.array, columns)
    return steps, middle, low, high
