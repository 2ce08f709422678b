"""Imports of torch and timm in a process of ours, in four fifths of the time."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def slow_imports() -> Iterator[None]:
    """Speeds up the imports within the context, in a process that belongs to a command.

    What they create stays for good, so the garbage collector neither runs within nor looks at it later. timm imports
    wandb where that is installed, for a function that we do not call: timm finds it missing here.
    """
    hides, collects = "wandb" not in sys.modules, gc.isenabled()
    gc.disable()
    if hides:
        sys.modules["wandb"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        if hides:
            del sys.modules["wandb"]
        gc.freeze()
        if collects:
            gc.enable()
