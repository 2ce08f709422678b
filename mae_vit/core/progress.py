"""Progress bars: on a terminal they move, in a log they leave a few lines."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from tqdm import tqdm

# Seconds between two updates of a bar.
_ON_TERMINAL_S, _IN_LOG_S = 0.5, 30.0


def progress(items: Iterable[Any] | None = None, **options: Any) -> tqdm[Any]:
    """Opens tqdm's bar over `items`, or over `total=`, with its other options."""
    interval = _ON_TERMINAL_S if sys.stderr.isatty() else _IN_LOG_S
    return tqdm(items, mininterval=interval, maxinterval=max(interval, 10.0), **options)
