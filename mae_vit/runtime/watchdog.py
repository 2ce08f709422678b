"""Ends a rank that stands still: else the others wait for it, and the cluster pays, for hours."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

_POLL_S = 1.0
# Of evaluation and saving, which the loop hears nothing of, over steps.
PATIENCE = 4.0


class Watchdog:
    """A thread that kills this process when the loop has said nothing for too long.

    SIGKILL, not an exception: a thread that waits in a collective, or on a dead file
    system, hears nothing else. The launcher then ends the other ranks, which watch
    themselves as well.
    """

    def __init__(self, timeout_s: float | None, *, rank: int) -> None:
        """Watches while it is open as a context; with None never."""
        self._timeout_s, self._rank = timeout_s, rank
        self._doing, self._since = "beginning", time.monotonic()
        self._patience = 1.0
        self._ended = threading.Event()

    def __enter__(self) -> Watchdog:
        self.heartbeat("beginning")
        if self._timeout_s is not None:
            threading.Thread(target=self._watch, daemon=True, name="watchdog").start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()

    def heartbeat(self, doing: str) -> None:
        """Says that the rank goes on, and with what."""
        self._doing, self._since = doing, time.monotonic()

    @contextmanager
    def long_phase(self, doing: str) -> Iterator[None]:
        """While it is open the rank does one long thing, and has more time for it."""
        self.heartbeat(doing)
        self._patience = PATIENCE
        try:
            yield
        finally:
            self.heartbeat(doing)
            self._patience = 1.0

    def _watch(self) -> None:
        assert self._timeout_s is not None
        while not self._ended.wait(_POLL_S):
            if (still := time.monotonic() - self._since) > self._timeout_s * self._patience:
                print(
                    f"error: rank {self._rank} stands still since {still:.0f} s ({self._doing}): killed; "
                    "the last checkpoint is good (run.hang_timeout_s). Where it stood:",
                    file=sys.stderr,
                    flush=True,
                )
                faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
                os.kill(os.getpid(), signal.SIGKILL)
