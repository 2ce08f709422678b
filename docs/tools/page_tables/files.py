"""Result files, and the Markdown of a table."""

from __future__ import annotations

import json
from collections.abc import Sequence
from decimal import ROUND_HALF_UP, Decimal
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
RESULTS = ROOT / "docs" / "results"


@cache
def text(name: str) -> str:
    """The text of a file under docs/results."""
    return (RESULTS / name).read_text()


@cache
def load(name: str) -> dict[str, Any]:
    """The content of a JSON file under docs/results. It is shared, so leave it as it is."""
    content: dict[str, Any] = json.loads(text(name))
    return content


def results(name: str) -> dict[str, Any]:
    """The measurements of a benchmark's file."""
    content: dict[str, Any] = load(name)["results"]
    return content


def decimal(value: float, digits: int = 1) -> str:
    """A number with so many decimals, a half rounded up: 64.35, which no float is, becomes 64.4."""
    exact = Decimal(str(round(value, 9)))
    return str(exact.quantize(Decimal(1).scaleb(-digits), ROUND_HALF_UP))


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)
