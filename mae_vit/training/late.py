"""Device values read by the host one step late, so that no step waits for them."""

from __future__ import annotations

import torch
from torch import Tensor


class LateReader:
    """Copies small tensors to the host without blocking; each is read at the next push.

    On a GPU the copy goes to pinned memory behind an event; by the time of the next
    step it is done, and reading costs no synchronization.
    """

    def __init__(self) -> None:
        """Starts empty."""
        self._pending: tuple[Tensor, torch.cuda.Event | None] | None = None

    def push(self, values: Tensor) -> list[float] | None:
        """Hands in this step's values (n,); returns the previous step's, None at first."""
        previous = self.flush()
        if values.is_cuda:
            host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            host.copy_(values, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
            self._pending = (host, event)
        else:
            self._pending = (values.detach().clone(), None)
        return previous

    def flush(self) -> list[float] | None:
        """Returns what is pending, waiting for it."""
        if self._pending is None:
            return None
        host, event = self._pending
        self._pending = None
        if event is not None:
            event.synchronize()
        return host.tolist()
