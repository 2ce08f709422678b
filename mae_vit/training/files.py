"""Writing files so that a kill at any moment leaves the old one or the new one, whole."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def write_atomically(path: Path, data: bytes) -> None:
    """Writes through a temporary name, on disk before it takes its place."""
    write_parts_atomically(path, [data])


def write_parts_atomically(path: Path, parts: Iterable[bytes | memoryview]) -> None:
    """Writes what comes, one after the other, as `write_atomically`."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with partial.open("wb") as file:
            for part in parts:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    sync_folder(path.parent)


def write_json(path: Path, value: Any) -> None:
    """Writes JSON atomically."""
    write_atomically(path, (to_json(value, indent=2) + "\n").encode())


def to_json(value: Any, *, indent: int | None = None) -> str:
    """Returns JSON, in which numbers that are not finite are null: it knows no other word for them."""
    return json.dumps(_finite(value), indent=indent, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def sync_folder(folder: Path) -> None:
    """Makes renames in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
