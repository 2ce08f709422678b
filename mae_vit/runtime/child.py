"""Runs a job that is called from Python in a new process, so that the caller's process stays unchanged.

The child's output goes to the caller's `sys.stdout` and `sys.stderr`, which may be a notebook's. Its result or error
comes back in a file.
"""

from __future__ import annotations

import codecs
import os
import pickle
import pkgutil
import signal
import subprocess
import sys
from io import BufferedReader
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread
from typing import Any, TextIO, cast

from mae_vit.core.errors import EXIT_INTERRUPTED, EXIT_REQUEUE, InputError
from mae_vit.core.files import write_atomically
from mae_vit.runtime.failures import EXIT_CODES, RunInterrupted, TrainingFailed, ignore_closed_terminal
from mae_vit.runtime.imports import slow_imports
from mae_vit.runtime.signals import STOP_SIGNALS, handling, install_early_handlers

# Drops the first path, the current folder, whose modules may shadow the standard library.
_PROGRAM = (
    "import sys; del sys.path[0]; import pickle; sys.path[:] = pickle.load(sys.stdin.buffer); "
    "from mae_vit.runtime.child import answer_parent; answer_parent()"
)
# Errors to pass to the caller; any other is a bug, whose traceback the child prints.
_ERRORS: tuple[type[BaseException], ...] = (RunInterrupted, *EXIT_CODES)
# Limit, since processes that the child has left behind may keep its output open.
_LAST_OUTPUT_S = 5.0


def call_in_child(function: str, argument: Any) -> Any:
    """Calls a function, `module:name`, with a picklable argument in a new process.

    The new process receives this process's stop signals, and saves and ends if this process dies.

    Raises:
        InputError: as the function does; also if this process has a process group.
        KeyboardInterrupt: after Ctrl-C, once the run is saved.
        RunInterrupted: after another stop request, once the run is saved.
        TrainingFailed: as the function does; also if its process ends without an answer.
    """
    distributed = sys.modules.get("torch.distributed")
    if distributed and distributed.is_available() and distributed.is_initialized():
        raise InputError(
            "this process has a torch.distributed process group, and a run makes its own; destroy it first"
        )
    # Jupyter's streams are not terminals, but show progress bars.
    shows_bars = sys.stderr.isatty() or "ipykernel" in sys.modules
    with TemporaryDirectory(prefix="mae-vit-") as folder:
        answer = Path(folder) / "answer.pickle"
        # A new session: Ctrl-C reaches the child only through the handler below.
        process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        with process, handling(STOP_SIGNALS, lambda number, frame: process.send_signal(number)):
            assert process.stdin
            process.stdin.write(pickle.dumps(sys.path))
            process.stdin.write(pickle.dumps((function, argument, sys.argv, shows_bars, answer)))
            process.stdin.flush()
            pipes = ((process.stdout, sys.stdout), (process.stderr, sys.stderr))
            readers = [Thread(target=_forward, args=pipe, daemon=True) for pipe in pipes]
            for reader in readers:
                reader.start()
            process.wait()
            for reader in readers:
                reader.join(_LAST_OUTPUT_S)
        result = pickle.loads(answer.read_bytes()) if answer.exists() else _error_from(process.returncode)
    if isinstance(result, RunInterrupted) and result.reason == "SIGINT":
        raise KeyboardInterrupt
    if isinstance(result, BaseException):
        raise result
    return result


def _forward(pipe: BufferedReader, stream: TextIO) -> None:
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    while data := pipe.read1():
        stream.write(decoder.decode(data))
        stream.flush()


def _error_from(code: int) -> BaseException:
    """Returns the error for a process that ended without an answer, by its exit code."""
    if code in (EXIT_INTERRUPTED, -signal.SIGINT):
        return KeyboardInterrupt()
    if code == EXIT_REQUEUE:
        return RunInterrupted("a stop request")
    ended = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    return TrainingFailed(f"the process of the run {ended} (see its output); the same call resumes")


def answer_parent() -> None:
    """Runs in the child: makes the call that the parent sends, and writes its result or error."""
    install_early_handlers()
    function, argument, sys.argv, shows_bars, answer = pickle.load(sys.stdin.buffer)
    for stream in (sys.stdout, sys.stderr):
        cast("Any", stream).reconfigure(encoding="utf-8", errors="replace", line_buffering=True)
    if shows_bars:
        sys.stderr.isatty = lambda: True  # type: ignore[method-assign]
    # The run is saved even if the parent no longer reads its output.
    ignore_closed_terminal()
    Thread(target=_stop_after_parent, daemon=True).start()
    try:
        with slow_imports():
            call = pkgutil.resolve_name(function)
        result = call(argument)
        if process_group := sys.modules.get("mae_vit.runtime.process_group"):
            process_group.leave()
    except _ERRORS as error:
        result = error
    write_atomically(answer, pickle.dumps(result))


def _stop_after_parent() -> None:
    """Sends this process SIGTERM, which saves, when its parent ends and so closes the pipe."""
    # Not `sys.stdin`: at exit Python would wait for its lock.
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
