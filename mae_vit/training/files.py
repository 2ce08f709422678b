"""Writing files so that a kill at any moment leaves the old one or the new one, whole."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def write_atomically(path: Path, data: bytes) -> None:
    """Writes through a temporary name, on disk before it takes its place."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with partial.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    sync_folder(path.parent)


def write_json(path: Path, value: Any) -> None:
    """Writes JSON atomically."""
    write_atomically(path, (json.dumps(value, indent=2) + "\n").encode())


def sync_folder(folder: Path) -> None:
    """Makes renames in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
