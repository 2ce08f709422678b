"""Output to a terminal or pipe that may be closed."""

from __future__ import annotations

import os
import sys
from typing import Any, TextIO


class TolerantStream:
    """A text stream that writes to the null device once its reader is gone.

    A closed terminal must not prevent a save, and `... --dry-run | head` must not end in a traceback.
    """

    def __init__(self, stream: TextIO) -> None:
        """Wraps `stream`."""
        self._stream = stream

    def write(self, text: str) -> int:
        """Writes; redirects to the null device if the reader is gone."""
        try:
            return self._stream.write(text)
        except OSError:
            self._give_up()
            return len(text)

    def flush(self) -> None:
        """Flushes; redirects to the null device if the reader is gone."""
        try:
            self._stream.flush()
        except OSError:
            self._give_up()

    def _give_up(self) -> None:
        # Redirect the descriptor, since buffers and libraries write to it too.
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), self._stream.fileno())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def ignore_closed_terminal() -> None:
    """Wraps standard output and standard error in `TolerantStream`."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if not isinstance(stream, TolerantStream):
            setattr(sys, name, TolerantStream(stream))
