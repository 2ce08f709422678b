"""A run's curves as charts: over the band of its reference, where there is one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from mae_vit.inspection.page import svg
from mae_vit.pretraining.reference_curves import Band, Curve, curves_of
from mae_vit.pretraining.report.run_record import RunRecord
from mae_vit.pretraining.report.verdict import Comparison, held_out_names, numbers, values_of

REFERENCE_COLOR, RUN_COLOR = svg.COLORS[0], svg.COLORS[1]
# Of more points a chart shows means and ranges: a page of a long run stays small.
_MOST_POINTS = 400
# A chart whose values span more decades has a logarithmic axis.
_LOG_SPAN = 100.0
# Measures of the features, which need no labels; other metrics keep their names as titles.
_HELD_OUT_TITLES = {
    "rankme": "held-out images: effective rank of features (RankMe)",
    "feature_std": "held-out images: standard deviation of features (0 after a collapse)",
}
_SECTIONS = {
    "lr": "learning rate",
    "grad_norm": "gradient norm",
    "images_per_s": "images per second",
    "data_wait_frac": "share of time waiting for data",
}


def draw_band(axes: Axes, band: Band, label: str) -> None:
    """Draws a reference: the mean over its seeds and the band that runs of other seeds lie in."""
    low, high = band.mean - band.half_width, band.mean + band.half_width
    axes.fill_between(band.steps, low, high, color=REFERENCE_COLOR, alpha=0.2, label=label)
    axes.plot(band.steps, band.mean, color=REFERENCE_COLOR, linewidth=1)


def draw_curve(axes: Axes, curve: Curve, label: str) -> None:
    """Draws a run over its band."""
    marker = "o" if len(curve.steps) == 1 else None
    axes.plot(curve.steps, curve.values, color=RUN_COLOR, label=label, marker=marker)


def draw_all(record: RunRecord, comparison: Comparison | None) -> tuple[list[tuple[str, str]], ...]:
    """Draws every curve of a run.

    Returns:
        Charts (title, SVG): what was learned, then how the training went.
    """
    bands = comparison.reference.bands if comparison else {}
    label = comparison.reference.name if comparison else ""
    learned = list(_learned(record, bands, label))
    course = []
    for key, title in _SECTIONS.items():
        points = [(line["step"], value) for line in record.lines for value in numbers([line.get(key)])]
        if points:
            course.append((title, _chart({"": points}, None, "")))
    return learned, course


def _learned(record: RunRecord, bands: Mapping[str, Band], label: str) -> Iterator[tuple[str, str]]:
    losses = [(line["step"], value) for line in record.lines for value in numbers([line.get("loss")])]
    if losses:
        title = "training loss"
        band = bands.get("loss")
        if band is not None:
            # The band is of means over parts of the run: single lines are noisier.
            curve = curves_of(record.lines, int(band.steps[-1]))["loss"]
            losses = list(zip(curve.steps.tolist(), curve.values.tolist(), strict=True)) or losses
            title += ", means over parts of the run"
        yield title, _chart({"this run": losses}, band, label)
    for name in held_out_names(record.lines):
        points = values_of(record.lines, "heldout", name)
        # Of a constant (the baseline of held-out images) there is nothing to see.
        if len(points) == 1 or len({value for _, value in points}) > 1:
            band = bands.get(f"heldout.{name}")
            yield (
                _HELD_OUT_TITLES.get(name, f"held-out images: {name}"),
                _chart({"this run": points}, band, label),
            )
    scores = {
        name.removesuffix("_top1").replace("_", " "): points
        for name in held_out_names(record.lines, "probe")
        if name.endswith("top1") and (points := values_of(record.lines, "probe", name))
    }
    if scores:
        yield "online probe: top-1 of other held-out images", _chart(scores, None, "")


def _chart(curves: Mapping[str, Sequence[tuple[int, float]]], band: Band | None, label: str) -> str:
    """Draws curves of (step, value) points by name, over a band if there is one."""
    with svg.chart("step", "", width=4.6, height=2.7) as (figure, axes):
        if band is not None:
            draw_band(axes, band, svg.plain(f"band of {label}"))
        first = 1 if band is not None else 0
        for place, (name, points) in enumerate(curves.items()):
            color = svg.COLORS[(place + first) % len(svg.COLORS)]
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
        if band is None and values.min() > 0 and values.max() > _LOG_SPAN * values.min():
            axes.set_yscale("log")
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
        if band is not None or len(curves) > 1:
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
