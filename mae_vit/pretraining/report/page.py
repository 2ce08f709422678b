"""Writes the page of a run: texts and charts for the template `run.html`."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
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
_MOST_POINTS = 300
# Largest number of damaged samples on the page.
_MOST_ROWS = 50
# Words for keys of metrics and summaries; other keys lose their underscores.
_WORDS = {
    "psnr_db": "predicted pixels, PSNR in dB",
    "psnr_gain_db": "predicted pixels, dB above the baseline",
    "psnr_baseline_db": "baseline without learning, PSNR in dB",
    "accuracy": "accuracy, %",
    "accuracy_on_mask": "accuracy on masked patches, %",
    "accuracy_nearest_visible": "the same by copying the nearest visible patch, %",
    "rankme": "effective rank of features (RankMe)",
    "feature_std": "standard deviation of features",
    "few_shot_top1": "linear layer, %",
    "knn_top1": "nearest neighbors, %",
    "per_class": "score by class",
    "chance_top1": "always the most frequent class, %",
    "retrieval_top1": "views that find their partner, %",
    "z_std": "standard deviation of projections",
    "lr": "learning rate",
    "grad_norm": "gradient norm",
    "images_per_s": "images per second",
    "data_wait_frac": "waiting for data, % of the time",
    "skipped": "data steps left out",
    "samples": "images seen",
    "wall_s": "time",
    "flops_per_step": "FLOPs per step",
    "heldout": "held-out images",
    "probe": "online probe",
    "probe_at_start": "online probe before training",
}
_COURSE = ("lr", "grad_norm", "images_per_s", "data_wait_frac")
_INCIDENT_COLUMNS = ("step", "reason", "loss", "grad_norm", "back_to_step", "try", "skipped")
_DAMAGE_COLUMNS = ("shard", "key", "offset", "step", "reason")
Charts = list[tuple[str, Markup]]


def write_page(record: RunRecord) -> str:
    """Returns the page of a run."""
    return render(
        "run.html",
        title=record.name,
        about=_about(record),
        verdict=verdict(record),
        loss=_loss(record),
        held_out=_held_out(record),
        pictures=_pictures(record.pictures),
        results=_results(record),
        course=_charts(record, _COURSE),
        incidents=_table([_with_span(incident) for incident in record.incidents], _INCIDENT_COLUMNS),
        damaged=_table(record.damaged[:_MOST_ROWS], _DAMAGE_COLUMNS),
        num_damaged=len(record.damaged),
        plan=record.plan,
        environment=_environment(record),
        labels="finetune" in record.config,
        config=dump_yaml(record.config) if record.config else "",
        problems=record.problems,
    )


def _about(record: RunRecord) -> str:
    """Describes the run: objective, network, data, seed, folder."""
    keys = {"objective": ("objective", "name"), "network": ("model", "name"), "data": ("data", "path")}
    parts = [
        f"{title} {_text(record.section(section)[key])}"
        for title, (section, key) in {**keys, "seed": ("run", "seed")}.items()
        if key in record.section(section)
    ]
    return ", ".join([*parts, f"folder {record.path.resolve().name}"])


def _loss(record: RunRecord) -> Markup | None:
    """Draws the loss of training and of held-out images; None before the first step is logged."""
    curves = {"training": _curve(record, "loss"), "held-out images": _curve(record, "loss", "heldout")}
    return _chart(curves, record.step, vertical="loss", width=7.0, height=3.2)


def _held_out(record: RunRecord) -> Charts:
    """Draws the online probe and the other metrics of held-out images."""
    # Before training, the probe has a score of its own.
    whole = replace(
        record, lines=({"step": 0, "probe": record.summary.get("probe_at_start") or {}}, *record.lines)
    )
    probes = [name for name in _names(record.lines, "probe") if name.endswith("top1")]
    curves = {_words(name).removesuffix(", %"): _curve(whole, name, "probe") for name in probes}
    probe = _chart(curves, record.step)
    # The baseline is the same at each step.
    others = [name for name in _names(record.lines, "heldout") if name not in ("loss", "psnr_baseline_db")]
    drawn = [("online probe: accuracy, %", probe)] if probe else []
    return drawn + _charts(record, others, "heldout")


def _charts(record: RunRecord, names: Sequence[str], group: str | None = None) -> Charts:
    """Draws a chart for each metric that was logged."""
    drawn = {name: _chart({"": _curve(record, name, group)}, record.step) for name in names}
    return [(_words(name), chart) for name, chart in drawn.items() if chart]


def _names(lines: Sequence[Mapping[str, Any]], group: str) -> list[str]:
    return list(dict.fromkeys(name for line in lines for name in line.get(group, {})))


def _words(name: str) -> str:
    return _WORDS.get(name, name.replace("_", " "))


def _curve(record: RunRecord, name: str, group: str | None = None) -> Points:
    """Returns (step, value) pairs; shares in percent where the words say so."""
    scale = 100 if "%" in _words(name) else 1
    return [(step, scale * value) for step, value in metric_values(record.lines, name, group)]


def _chart(
    curves: Mapping[str, Points], end: int, *, vertical: str = "", width: float = 4.6, height: float = 2.7
) -> Markup | None:
    """Draws curves of (step, value) by name, from step 0 to `end`; None without points.

    The y-axis includes zero, so that noise looks small.
    """
    curves = {name: points for name, points in curves.items() if points}
    if not curves:
        return None
    with charts.chart("step", vertical, width=width, height=height) as (figure, axes):
        for number, (name, points) in enumerate(curves.items()):
            color = charts.COLORS[number % len(charts.COLORS)]
            marker = "o" if len(points) < 20 else None
            steps, mean, low, high = thinned(np.array(points, np.float64))
            if len(steps) < len(points):
                axes.fill_between(steps, low, high, color=color, alpha=0.25, linewidth=0)
            style: dict[str, Any] = {"color": color, "linewidth": 1.4, "marker": marker, "markersize": 3.5}
            axes.plot(steps, mean, label=charts.plain(name), **style)
        values = np.array([value for points in curves.values() for _, value in points])
        axes.set_ylim(min(0.0, 1.05 * values.min()), max(0.0, 1.05 * values.max()) or 1.0)
        axes.set_xlim(0, 1.02 * max(end, 1))
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
        if len(curves) > 1:
            charts.legend_below(figure)
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
            rows |= {
                f"{_words(name)}: {_words(inner)}": _result(inner, each) for inner, each in value.items()
            }
        else:
            rows[_words(name)] = _result(name, value)
    return rows


def _result(name: str, value: Any) -> str:
    if name == "wall_s" and value is not None:  # before the first line of metrics
        return format_duration(value)
    return _text(100 * value if isinstance(value, float) and "%" in _words(name) else value)


def _with_span(incident: Mapping[str, Any]) -> dict[str, Any]:
    first, end = incident["skipped_data_steps"]
    return {**incident, "skipped": f"{first} to {end - 1}"}


def _table(records: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    """Returns head and body of a table of records; `columns` are their keys."""
    return list(map(_words, columns)), [[_text(record.get(name)) for name in columns] for record in records]


def _environment(record: RunRecord) -> dict[str, str]:
    rows = {
        _words(name): _text(value)
        for name, value in record.environment.items()
        if value not in (None, [], "")
    }
    command = record.environment.get("command")
    return rows | ({"command": shlex.join(map(str, command))} if command else {})


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
