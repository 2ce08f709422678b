"""`protocol.json`: what a comparison set out to compare, and what was changed after test results were there.

A choice that follows test results can steer them. So the comparison keeps its settings, and the report lists every
change that was made after the first test result.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from mae_vit.core.files import write_json
from mae_vit.finetuning.comparison.config import CompareConfig
from mae_vit.training.engines.precision import Precision

PROTOCOL = "protocol.json"
# They change no result.
_FREE = ("run", "parallel")


def keep_protocol(folder: Path, config: CompareConfig, *, precision: str, tested: int) -> None:
    """Writes the settings; if test results are there, also how they differ from the settings before.

    Args:
        folder: of the comparison; it exists.
        config: the settings now.
        precision: what `train.precision=auto` is in this comparison.
        tested: cells with a test result.
    """
    now = {key: value for key, value in config.model_dump(mode="json").items() if key not in _FREE}
    path = folder / PROTOCOL
    before: dict[str, Any] = (
        json.loads(path.read_text()) if path.exists() else {"settings": now, "changes": []}
    )
    changes: list[dict[str, Any]] = before["changes"]
    changed = sorted(_differences(before["settings"], now))
    if changed and tested:
        when = datetime.now(timezone.utc).isoformat(timespec="seconds")
        changes.append({"time": when, "tested_cells": tested, "settings": changed})
    write_json(path, {"settings": now, "precision": precision, "changes": changes})


def begun_precision(folder: Path) -> Precision | None:
    """Returns the precision that the comparison began in; None if it has not begun."""
    path = folder / PROTOCOL
    begun: Precision | None = json.loads(path.read_text()).get("precision") if path.exists() else None
    return begun


def describe_changes(folder: Path) -> list[str]:
    """Returns a sentence for each change that was made after test results; empty without a protocol."""
    path = folder / PROTOCOL
    changes = json.loads(path.read_text())["changes"] if path.exists() else []
    return [
        f"Settings were changed after test results were read ({change['time']}, {change['tested_cells']} cells): "
        f"{', '.join(change['settings'])}."
        for change in changes
    ]


def _differences(before: Any, now: Any, place: str = "") -> Iterator[str]:
    """Yields the dotted names of values that differ."""
    if isinstance(before, dict) and isinstance(now, dict):
        for key in {**before, **now}:
            yield from _differences(before.get(key), now.get(key), f"{place}.{key}" if place else key)
    elif isinstance(before, list) and isinstance(now, list) and _named(before) and _named(now):
        yield from _differences(_by_name(before), _by_name(now), place)
    elif before != now:
        yield place


def _named(values: list[Any]) -> bool:
    return all(isinstance(value, dict) and "name" in value for value in values)


def _by_name(values: list[Any]) -> dict[str, Any]:
    return {value["name"]: value for value in values}
