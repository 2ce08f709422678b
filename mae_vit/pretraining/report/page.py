"""The report of a pretraining run: one page that needs nothing beside it."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from mae_vit.core.messages import format_duration
from mae_vit.inspection.page import html
from mae_vit.pretraining.report.curves import draw_all
from mae_vit.pretraining.report.run_record import RunRecord, command_of
from mae_vit.pretraining.report.verdict import verdict

_MOST_ROWS = 50
# Columns of the plan's text: a name, then what is said of it.
_PLAN_COLUMN = 12
_NO_PLAN = "This run has no plan.txt. Its config with --dry-run prints the plan."
_PICTURES = """Held-out images: the first pictures of the run, those of its middle and the last."""
_INCIDENTS = """Each line is a step whose loss or gradient was bad. The run went back to a checkpoint from before it
and left out the data of the steps around it. `mae-vit replay RUN --data-step N` draws these data."""


def write_page(record: RunRecord) -> str:
    """Returns the page of a run."""
    learned, course = draw_all(record)
    parts = [
        f"<h1>{escape(record.name)}</h1>",
        f'<p class="note">{escape(_about(record))}</p>',
        f'<p class="headline">{escape(" ".join(verdict(record)))}</p>',
    ]
    if learned:
        parts.append(html.charts(learned))
    parts += _pictures(record.pictures)
    parts += _section("Results", html.facts(_results(record.summary, record)))
    if course:
        parts += _section("Course of the training", html.charts(course))
    parts += _incidents(record.incidents)
    parts += _damaged(record.damaged)
    parts += _section("Plan", _plan(record.plan))
    if environment := _environment(record):
        parts += _section("Environment", html.facts(environment))
    if record.config:
        text = f"<details><summary>all values</summary><pre>{escape(_yaml(record.config))}</pre></details>"
        parts += _section("Config", text)
    if record.problems:
        rows = "".join(f"<li>{escape(problem)}</li>" for problem in record.problems)
        parts += _section("Missing from this page", f"<ul>{rows}</ul>")
    return html.page(record.name, parts)


def _section(title: str, body: str) -> list[str]:
    return [f"<h2>{escape(title)}</h2>", body]


def _about(record: RunRecord) -> str:
    """What this is: objective, network, data, seed."""
    model, objective = record.section("model"), record.section("objective")
    data, run = record.section("data"), record.section("run")
    parts = [f"Pretraining run {record.path.resolve().name}"]
    if objective.get("name"):
        parts.append(f"objective {objective['name']}")
    if model.get("name"):
        parts.append(
            f"network {model['name']} on {_text(model.get('img_size'))} px in patches of "
            f"{_text(model.get('patch_size'))}"
        )
    if isinstance(record.summary.get("parameters"), int):
        parts.append(f"{record.summary['parameters']:,} parameters with the objective's")
    if data.get("path"):
        parts.append(f"data {data['path']}")
    if "seed" in run:
        parts.append(f"seed {run['seed']}")
    return ", ".join(parts) + "."


def _pictures(paths: Sequence[Path]) -> list[str]:
    """The first, the middle and the last pictures."""
    chosen = sorted({0, len(paths) // 2, len(paths) - 1}) if paths else []
    drawn = []
    for place in chosen:
        try:
            png = paths[place].read_bytes()
        except OSError:  # of a run that goes on, or goes back
            continue
        step = paths[place].stem.removeprefix("step-").lstrip("0") or "0"
        drawn.append((f"step {step}", html.image(png, f"pictures of step {step}")))
    if not drawn:
        return []
    return [*_section("Pictures", html.charts(drawn, large=True)), f'<p class="note">{_PICTURES}</p>']


def _results(summary: Mapping[str, Any], record: RunRecord) -> dict[str, str]:
    """The summary's values; without a summary, those of the last line of metrics."""
    values = dict(summary) or (dict(record.lines[-1]) if record.lines else {})
    rows = dict[str, str]()
    for name, value in values.items():
        if isinstance(value, dict):
            rows |= {f"{name}: {inner}": _text(one) for inner, one in value.items()}
        elif name == "wall_s" and isinstance(value, int | float):
            rows["time"] = format_duration(value)
        else:
            rows[name] = _text(value)
    return rows


def _incidents(incidents: Sequence[Mapping[str, Any]]) -> list[str]:
    if not incidents:
        return []
    head = ["step", "reason", "loss", "gradient norm", "back to step", "try", "data steps left out"]
    body = []
    for one in incidents:
        span = _span(one.get("skipped_data_steps"))
        names = ("step", "reason", "loss", "grad_norm", "back_to_step", "try")
        body.append([*(_text(one.get(name)) for name in names), span])
    table = html.table(head, body) + f'<p class="note">{escape(" ".join(_INCIDENTS.split()))}</p>'
    return _section(f"Incidents: {len(incidents):,}", table)


def _span(value: Any) -> str:
    """Steps from [first, stop) as `first to last`."""
    if isinstance(value, list) and len(value) == 2 and all(isinstance(one, int) for one in value):
        return f"{value[0]} to {value[1] - 1}"
    return _text(value)


def _damaged(damaged: Sequence[Mapping[str, Any]]) -> list[str]:
    if not damaged:
        return []
    head = ["shard", "key", "offset", "step", "reason"]
    body = [[_text(one.get(name)) for name in head] for one in damaged[:_MOST_ROWS]]
    table = html.table(head, body)
    if len(damaged) > _MOST_ROWS:
        table += f'<p class="note">{len(damaged) - _MOST_ROWS:,} more are in quarantine.jsonl.</p>'
    return _section(f"Damaged samples: {len(damaged):,}", table)


def _plan(text: str) -> str:
    """The plan as a table, its notes and warnings below."""
    if not text:
        return f'<p class="note">{escape(_NO_PLAN)}</p>'
    rows, notes = dict[str, str](), []
    for line in text.splitlines():
        name, said = line[:_PLAN_COLUMN].strip(), line[_PLAN_COLUMN:].strip()
        if line.startswith(("note: ", "warning: ")) or not said:
            notes.append(line)
        else:
            rows[name] = said
    return html.facts(rows) + "".join(f'<p class="note">{escape(note)}</p>' for note in notes)


def _environment(record: RunRecord) -> dict[str, str]:
    rows = {}
    for name, value in record.environment.items():
        if name == "command":
            rows[name] = command_of(record)
        elif isinstance(value, dict):
            rows[name] = ", ".join(f"{package} {_text(version)}" for package, version in value.items())
        elif value not in (None, []):
            rows[name] = ", ".join(map(_text, value)) if isinstance(value, list) else _text(value)
    return rows


def _text(value: Any) -> str:
    """A value of a file as the page shows it: numbers short, what is not known as a word."""
    if value is None:
        return "none"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value if isinstance(value, str) else json.dumps(value, default=str)
    return f"{value:,}" if isinstance(value, int) else f"{value:.5g}"


def _yaml(config: Mapping[str, Any]) -> str:
    yaml, stream = YAML(typ="safe", pure=True), io.StringIO()
    yaml.default_flow_style = False
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
    yaml.dump(dict(config), stream)
    return stream.getvalue()
