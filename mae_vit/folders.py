"""Folders that are written elsewhere and take their place at once."""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def partial_of(out: Path) -> Path:
    """The name that a folder has while this process writes it."""
    return out.with_name(f".{out.name}.{os.getpid()}.tmp")


def put_in_place(partial: Path, out: Path) -> None:
    """Renames; what lay there is there until the new folder is, then removed.

    Raises:
        OSError: if it cannot be; the earlier folder is back then.
    """
    if not out.exists():
        os.rename(partial, out)
        return
    old = partial.with_suffix(".old")
    os.rename(out, old)
    try:
        os.rename(partial, out)
    except OSError:
        os.rename(old, out)
        raise
    shutil.rmtree(old)
