"""Writes the page of a pretraining run: texts and charts for the template `run.html`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup
from matplotlib.ticker import MaxNLocator

from mae_vit.config.load import dump_yaml
from mae_vit.core.messages import format_duration
from mae_vit.pages import charts, image, render
from mae_vit.pretraining.report.run_record import RunRecord
from mae_vit.pretraining.report.verdict import Points, metric_values, verdict

# A chart of more points shows means and ranges, so that the page of a long run stays small.
_MOST_POINTS = 400
# Ratio of values above which a chart has a logarithmic axis.
_LOG_SPAN = 100.0
# Largest number of damaged samples on the page.
_MOST_ROWS = 50
# Width of the column of names in a plan's text.
_PLAN_COLUMN = 12
_HELD_OUT_TITLES = {
    "psnr_db": "predicted pixels, PSNR in dB (more is better)",
    "psnr_gain_db": "predicted pixels, dB above the mean color of each patch (0: no better)",
    "accuracy": "share named right",
    "rankme": "effective rank of features (RankMe; 1 after a collapse)",
    "feature_std": "standard deviation of features (0 after a collapse)",
}
_COURSE_TITLES = {
    "lr": "learning rate",
    "grad_norm": "gradient norm",
    "images_per_s": "images per second",
    "data_wait_frac": "share of time waiting for data",
}
_INCIDENT_COLUMNS = {
    "step": "step",
    "reason": "reason",
    "loss": "loss",
    "grad_norm": "gradient norm",
    "back_to_step": "back to step",
    "try": "try",
    "skipped": "data steps left out",
}
_DAMAGE_COLUMNS = {name: name for name in ("shard", "key", "offset", "step", "reason")}
Charts = list[tuple[str, Markup]]


def write_page(record: RunRecord) -> str:
    """Returns the page of a run."""
    plan, notes = _plan(record.plan)
    return render(
        "run.html",
        title=record.name,
        about=_about(record),
        verdict=" ".join(verdict(record)),
        learned=_learned(record),
        pictures=_pictures(record.pictures),
        results=_results(record),
        course=_course(record),
        incidents=_table([_with_span(incident) for incident in record.incidents], _INCIDENT_COLUMNS),
        damaged=_table(record.damaged[:_MOST_ROWS], _DAMAGE_COLUMNS),
        num_damaged=len(record.damaged),
        plan=plan,
        plan_notes=notes,
        environment=_environment(record),
        config=dump_yaml(record.config) if record.config else "",
        problems=record.problems,
    )


def _about(record: RunRecord) -> str:
    """Describes the run: objective, network, data, seed."""
    keys = {"objective": ("objective", "name"), "network": ("model", "name"), "data": ("data", "path")}
    parts = [f"Pretraining run {record.path.resolve().name}"]
    for title, (section, key) in {**keys, "seed": ("run", "seed")}.items():
        if key in record.section(section):
            parts.append(f"{title} {_text(record.section(section)[key])}")
    return ", ".join(parts) + "."


def _learned(record: RunRecord) -> Charts:
    """Draws losses, metrics of held-out images and the online probe."""
    lines, drawn = record.lines, Charts()
    if losses := metric_values(lines, "loss"):
        drawn.append(("training loss", _chart({"": losses})))
    for name in _names(lines, "heldout"):
        points = metric_values(lines, name, "heldout")
        # Leave out constants, such as the baseline of held-out images.
        if len(points) == 1 or len({value for _, value in points}) > 1:
            drawn.append((f"held-out images: {_HELD_OUT_TITLES.get(name, name)}", _chart({"": points})))
    scores = {
        name.removesuffix("_top1").replace("_", " "): points
        for name in _names(lines, "probe")
        if name.endswith("top1") and (points := metric_values(lines, name, "probe"))
    }
    if scores:
        drawn.append(("online probe: share of other held-out images named right", _chart(scores)))
    return drawn


def _course(record: RunRecord) -> Charts:
    """Draws learning rate, gradient norm and speed."""
    curves = {title: metric_values(record.lines, name) for name, title in _COURSE_TITLES.items()}
    return [(title, _chart({"": points}, whole=False)) for title, points in curves.items() if points]


def _names(lines: Sequence[Mapping[str, Any]], group: str) -> list[str]:
    return list(dict.fromkeys(name for line in lines for name in line.get(group, {})))


def _chart(curves: Mapping[str, Points], *, whole: bool = True) -> Markup:
    """Draws curves of (step, value) by name; with `whole` the y-axis includes zero, so that noise looks small."""
    with charts.chart("step", "", width=4.6, height=2.7) as (figure, axes):
        for number, (name, points) in enumerate(curves.items()):
            color = charts.COLORS[number % len(charts.COLORS)]
            marker = "o" if len(points) < 20 else None
            steps, mean, low, high = thinned(np.array(points, np.float64))
            if len(steps) < len(points):
                axes.fill_between(steps, low, high, color=color, alpha=0.25, linewidth=0)
            style: dict[str, Any] = {"color": color, "linewidth": 1.4, "marker": marker, "markersize": 3.5}
            axes.plot(steps, mean, label=charts.plain(name), **style)
        values = np.array([value for points in curves.values() for _, value in points])
        if values.min() > 0 and values.max() > _LOG_SPAN * values.min():
            axes.set_yscale("log")
        elif whole:
            bottom, top = axes.get_ylim()
            axes.set_ylim(bottom if values.min() < 0 else 0.0, max(0.0, top))
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
        if len(curves) > 1:
            charts.legend_below(axes, columns=2 if len(curves) < 3 else 3, gap=0.24)
        return charts.to_svg(figure)


def thinned(points: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Reduces points, float (n, 2) of step and value, to at most `_MOST_POINTS` groups.

    Returns:
        Last steps, means, lowest and highest values of the groups, each (m,).
    """
    parts = np.array_split(points, min(len(points), _MOST_POINTS))
    steps = np.array([part[-1, 0] for part in parts])
    mean, low, high = (np.array([f(part[:, 1]) for part in parts]) for f in (np.mean, np.min, np.max))
    return steps, mean, low, high


def _pictures(paths: Sequence[Path]) -> Charts:
    """Returns the first, middle and last pictures."""
    chosen = sorted({0, len(paths) // 2, len(paths) - 1}) if paths else []
    titles = {paths[n]: f"step {int(paths[n].stem.removeprefix('step-'))}" for n in chosen}
    return [(title, image(path.read_bytes(), f"pictures of {title}")) for path, title in titles.items()]


def _results(record: RunRecord) -> dict[str, str]:
    """Formats the summary's values; without a summary, those of the last line of metrics."""
    rows = dict[str, str]()
    for name, value in (record.summary or (record.lines[-1] if record.lines else {})).items():
        if isinstance(value, dict):
            rows |= {f"{name}: {inner}": _text(inner_value) for inner, inner_value in value.items()}
        elif name == "wall_s":
            rows["time"] = format_duration(value)
        else:
            rows[name] = _text(value)
    return rows


def _with_span(incident: Mapping[str, Any]) -> dict[str, Any]:
    first, end = incident["skipped_data_steps"]
    return {**incident, "skipped": f"{first} to {end - 1}"}


def _table(
    records: Sequence[Mapping[str, Any]], columns: Mapping[str, str]
) -> tuple[list[str], list[list[str]]]:
    """Returns head and body of a table of records; columns: key of a record -> title."""
    return list(columns.values()), [[_text(record.get(name)) for name in columns] for record in records]


def _plan(text: str) -> tuple[dict[str, str], list[str]]:
    """Splits a plan's text into rows (title -> text) and notes."""
    rows, notes = dict[str, str](), []
    for line in text.splitlines():
        name, value = line[:_PLAN_COLUMN].strip(), line[_PLAN_COLUMN:].strip()
        if line.startswith(("note: ", "warning: ")) or not value:
            notes.append(line)
        else:
            rows[name] = value
    return rows, notes


def _environment(record: RunRecord) -> dict[str, str]:
    rows = {name: _text(value) for name, value in record.environment.items() if value not in (None, [], "")}
    return rows | ({"command": record.command} if "command" in rows else {})


def _text(value: Any) -> str:
    """Formats a value for the page: numbers short, null as `none`."""
    if value is None:
        return "none"
    if isinstance(value, dict):
        return ", ".join(f"{name} {inner}" for name, inner in value.items())
    if isinstance(value, list):
        return ", ".join(map(_text, value))
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value if isinstance(value, str) else json.dumps(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.5g}"
