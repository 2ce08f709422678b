"""Kills a rank that hangs, for which the others would wait for hours."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_POLL_S = 1.0
# Factor by which evaluation and saving may take longer than a step.
PATIENCE = 4.0


class Watchdog:
    """A thread that kills this process when no heartbeat has come for too long.

    It uses SIGKILL, since a thread that waits in a collective or on a dead file system reacts to nothing else. The
    launcher then ends the other ranks. `faulthandler.dump_traceback_later` would not do: it exits with code 1, which
    forbids a requeue, and cannot print what the rank was doing.
    """

    def __init__(self, timeout_s: float | None, *, rank: int) -> None:
        """Watches while it is open as a context; never if `timeout_s` is None."""
        self._timeout_s, self._rank = timeout_s, rank
        self._doing = "beginning"
        # Since the last heartbeat, counted here: a clock goes on while the process is suspended.
        self._still_s = 0.0
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
        """Resets the watchdog; `doing` names what this rank is doing."""
        self._doing, self._still_s = doing, 0.0

    @contextmanager
    def long_phase(self, doing: str) -> Iterator[None]:
        """Multiplies the timeout by `PATIENCE` within the context."""
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
            self._still_s += _POLL_S
            if self._still_s > self._timeout_s * self._patience:
                print(
                    f"error: rank {self._rank} made no progress for {self._still_s:.0f} s ({self._doing}); killing it "
                    "(run.hang_timeout_s). The last checkpoint is good. Stack trace:",
                    file=sys.stderr,
                    flush=True,
                )
                faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
                os.kill(os.getpid(), signal.SIGKILL)
