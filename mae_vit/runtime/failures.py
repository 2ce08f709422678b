"""Failures of a run, which all ranks raise together, and their exit codes."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TextIO

from mae_vit.core.errors import (
    EXIT_FAILED,
    EXIT_INPUT,
    EXIT_INTERRUPTED,
    EXIT_REQUEUE,
    DamagedSample,
    FetchUnavailable,
    InputError,
    RemoteUnavailable,
)
from mae_vit.core.messages import error_reason
from mae_vit.runtime.signals import INTERRUPTED, is_local_rank_zero


class TolerantStream:
    """A text stream that writes to the null device once its reader is gone.

    A closed terminal must not prevent a save, and `... --dry-run | head` must not end in a traceback.
    """

    def __init__(self, stream: TextIO) -> None:
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


def run_to_exit_code(job: Callable[[], int]) -> int:
    """Runs a job; turns input errors and failures into one line and an exit code."""
    ignore_closed_terminal()
    try:
        try:
            code = job()
        except RunInterrupted:
            code = EXIT_REQUEUE
        # Imported (with torch) only if the job got far enough.
        if process_group := sys.modules.get("mae_vit.runtime.process_group"):
            process_group.leave()
        return code
    except tuple(EXIT_CODES) as error:
        of_rank = isinstance(error, FetchUnavailable | DamagedSample | PermissionError)
        if of_rank and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            # Each rank reads its own data, so only this rank reports the error.
            rank = os.environ.get("RANK", "0")
            print(f"error: rank {rank}: {_lines(error)[0]}", file=sys.stderr, flush=True)
        # All other errors occur on every rank: one line per node is enough.
        elif is_local_rank_zero():
            print_error(error)
        return find_exit_code(error)


def print_error(error: BaseException, *, interrupted: str = INTERRUPTED) -> None:
    """Prints an error of `EXIT_CODES` to stderr, a line for each mistake; for Ctrl-C the line `interrupted`."""
    stopped = isinstance(error, KeyboardInterrupt)
    lines = [interrupted] if stopped else [f"error: {line}" for line in _lines(error)]
    print("\n".join(lines), file=sys.stderr, flush=True)


def _lines(error: BaseException) -> Sequence[str]:
    """Words an error of `EXIT_CODES`, a line for each mistake."""
    if isinstance(error, InputError):
        return error.lines
    if isinstance(error, PermissionError) and error.filename:
        return [f"{error.filename}: {error_reason(error)}"]
    return [str(error)]


def find_exit_code(error: BaseException) -> int:
    """Returns the exit code of an error of `EXIT_CODES`."""
    return next(code for kind, code in EXIT_CODES.items() if isinstance(error, kind))


# Messages of PyTorch's backends when another rank has ended.
_LOST = (
    *("connection closed by peer", "connection reset by peer", "connection refused", "broken pipe"),
    *("timed out waiting", "remote process exited"),
)


def is_lost_rank(error: BaseException) -> bool:
    """Returns whether a collective failed because another rank is gone."""
    ours = isinstance(error, tuple(EXIT_CODES))  # they may quote the same words, of a server
    return (
        isinstance(error, RuntimeError) and not ours and any(words in str(error).lower() for words in _LOST)
    )


class LostRank(RuntimeError):
    """Another rank has ended (exit code 75): start the run again. Ranks may notice a node's failure before Slurm."""


class RunInterrupted(RuntimeError):
    """A stop request ended the run after it was saved (exit code 75); all ranks raise it together."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason

    def __str__(self) -> str:
        return f"stopped on {self.reason} after saving; the same call resumes"


class TrainingFailed(RuntimeError):
    """The run cannot continue (exit code 1); saved checkpoints are good. All ranks raise it together."""


@dataclass
class BadStep(RuntimeError):
    """A step after which the run must roll back; all ranks raise it together."""

    step: int
    reason: str
    loss: float | None = None
    grad_norm: float | None = None
    losses: tuple[float, ...] = field(default=(), repr=False)

    def __str__(self) -> str:
        return f"step {self.step} {self.reason}"


# These errors, and `RunInterrupted`, become a line and an exit code; any other is a bug and shows its traceback.
EXIT_CODES: dict[type[BaseException], int] = {
    InputError: EXIT_INPUT,
    TrainingFailed: EXIT_FAILED,
    DamagedSample: EXIT_FAILED,
    LostRank: EXIT_REQUEUE,
    FetchUnavailable: EXIT_REQUEUE,
    RemoteUnavailable: EXIT_REQUEUE,
    KeyboardInterrupt: EXIT_INTERRUPTED,
    # A file or folder that belongs to someone else: pathlib's questions about it raise, too.
    PermissionError: EXIT_INPUT,
}
