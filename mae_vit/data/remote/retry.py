"""How long something is tried again while nothing comes of it."""

from __future__ import annotations

import sys
import time

from mae_vit.core.errors import FetchUnavailable

_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.5, 20.0
_WARNED_AFTER_S = 10.0


class RetryTimer:
    """Waits that grow, and an end; progress begins anew."""

    def __init__(self, seconds: float, failure: str) -> None:
        """Begins.

        Args:
            seconds: without progress, after which it ends.
            failure: what does not work, as messages begin.
        """
        self._seconds, self._failure = seconds, failure
        self._largest, self._warned = -1, False
        self.progress()

    def progress(self) -> None:
        """Hears that something came."""
        self._since, self._wait = time.monotonic(), _FIRST_WAIT_S

    def report_size(self, size: int) -> None:
        """Hears how large it is by now; to grow is progress."""
        if size > self._largest:
            self._largest = size
            self.progress()

    def check(self, problem: str) -> None:
        """Says once what it waits for.

        Raises:
            FetchUnavailable: at the end.
        """
        waited = time.monotonic() - self._since
        if waited >= self._seconds:
            raise FetchUnavailable(f"{self._failure}, for {self._seconds:.0f} s: {problem}")
        if waited >= _WARNED_AFTER_S and not self._warned:
            self._warned = True
            left = self._seconds - waited
            print(f"warning: {self._failure}: {problem}; trying for {left:.0f} s more", file=sys.stderr)

    def wait(self, problem: str) -> None:
        """Waits before the next try.

        Raises:
            FetchUnavailable: at the end.
        """
        self.check(problem)
        time.sleep(self._wait)
        self._wait = min(2 * self._wait, _LONGEST_WAIT_S)
