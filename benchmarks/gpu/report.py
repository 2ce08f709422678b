"""Markdown from result files: for each machine and commit its versions, and a table or more of each part."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.gpu.lines import ENVIRONMENT, FAILED, read_lines
from mae_vit.core.errors import InputError

# What a line says beside its figures.
_ABOUT = ("part", "key", "tiny", "commit", "sources", "device", "time", "after_s")
_PACKAGES = ("torch", "deepspeed", "timm", "transformers", "torchvision")

Line = dict[str, Any]


def write_report(folder: Path) -> str:
    """Reads all lines of a folder; of a figure that was measured twice, the last counts.

    Raises:
        InputError: if there are none.
    """
    lines = [line for path in sorted(folder.glob("*.jsonl")) for line in read_lines(path)]
    if not lines:
        raise InputError(
            f"{folder} holds no results (*.jsonl): `python -m benchmarks.gpu PART --out {folder}`"
        )
    groups: dict[tuple[Any, ...], list[Line]] = {}
    for line in lines:
        groups.setdefault((line["device"], line["commit"], line["sources"], line["tiny"]), []).append(line)
    return "\n".join(part for group in groups.values() for part in _section(group))


def _section(lines: list[Line]) -> Iterable[str]:
    first = lines[0]
    yield f"## {first['device']}{' (tiny sizes: no figures of speed)' if first['tiny'] else ''}\n"
    yield f"Commit {first['commit'] or 'unknown'}, sources {first['sources']}."
    environments = [line for line in lines if line["key"] == ENVIRONMENT]
    if environments:
        yield _describe(environments[-1])
    newest = {(line["part"], line["key"]): line for line in lines if line["key"] != ENVIRONMENT}
    for part in dict.fromkeys(line["part"] for line in lines):
        rows = [line for (of, _), line in newest.items() if of == part]
        if rows:
            yield f"\n### {part}\n"
            yield from _tables(rows)
    yield ""


def _describe(environment: Line) -> str:
    packages = environment["packages"]
    versions = [f"{name} {packages[name]}" for name in _PACKAGES if name in packages]
    machine = [
        f"{environment['cores']} cores of {environment['processor']}",
        f"Python {environment['python']}",
    ]
    return f"{', '.join([*environment['gpus'], *machine, *versions])}."


def _tables(rows: list[Line]) -> Iterable[str]:
    """One table for all rows of the same columns."""
    tables: dict[tuple[str, ...], list[Line]] = {}
    for row in rows:
        tables.setdefault(tuple(_columns(row)), []).append(row)
    for columns, members in tables.items():
        yield f"| | {' | '.join(name.replace('_', ' ') for name in columns)} |"
        yield f"|{' --- |' * (1 + len(columns))}"
        for row in members:
            yield f"| {row['key']} | {' | '.join(_cell(row[name]) for name in columns)} |"
        yield ""


def _columns(row: Line) -> Iterable[str]:
    """The columns of a row; of a failed one only the reason."""
    if FAILED in row:
        return [FAILED]
    return [name for name in row if name not in _ABOUT and not _is_long(row[name])]


def _is_long(value: Any) -> bool:
    return isinstance(value, dict) or (isinstance(value, list) and len(value) > 2)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return "-".join(_cell(one) for one in value)
    if isinstance(value, float) and abs(value) >= 1000:
        return f"{value:,.0f}"
    return str(value).replace("|", "\\|")
