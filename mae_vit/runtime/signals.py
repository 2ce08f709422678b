"""Stop requests: signals and a dead launcher."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import psutil

from mae_vit.core.errors import EXIT_INTERRUPTED, EXIT_REQUEUE

# Programs (or Python modules) whose death stops their ranks. Not shells and terminals, whose end must
# not end a run.
_LAUNCHERS = ("deepspeed", "torchrun", "torch.distributed", "srun", "slurmstepd", "mpirun")
_DOTTED = tuple(f"{name}." for name in _LAUNCHERS)
_POLL_S = 1.0
INTERRUPTED = "interrupted; the same command resumes"
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
# LOCAL_RANK as the launcher set it, if DeepSpeed needs another number.
PLACE_ON_NODE = "MAE_VIT_PLACE_ON_NODE"
_heard_early: list[str] = []

Handler = Callable[[int, FrameType | None], object] | int


def install_early_handlers() -> None:
    """Handles signals from a program's first lines until there is a `StopRequest`.

    SIGUSR1, which a scheduler may send at any time, is recorded: its default would kill a process that
    still imports, so a job with a short limit would never take a step. Ctrl-C ends the process with one
    line. SIGTERM keeps its default, which ends the process: there is nothing to save yet.
    """
    signal.signal(signal.SIGUSR1, lambda number, frame: _heard_early.append(signal.Signals(number).name))
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, lambda number, frame: _end_now(INTERRUPTED))


@contextmanager
def handling(numbers: Iterable[int], handler: Handler) -> Iterator[None]:
    """Handles signals by `handler` within the context; ignored signals stay ignored, as `nohup` needs.

    Has no effect outside the main thread, because of Python's rules.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in numbers}
    for number, held in before.items():
        if held != signal.SIG_IGN:
            signal.signal(number, handler)
    try:
        yield
    finally:
        for number, held in before.items():
            signal.signal(number, held)


@contextmanager
def blocked(numbers: Iterable[int]) -> Iterator[None]:
    """Blocks signals within the context, also in multiprocessing's processes that start in it."""
    # Start it before: its first start would unblock signals.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def without_main() -> Iterator[None]:
    """Keeps multiprocessing's processes that start in the context from running the main program again.

    They do not need it, and a script that calls the library may lack the `__main__` guard.
    """
    main = sys.modules["__main__"].__dict__
    held: dict[str, Any] = {name: main.pop(name) for name in ("__file__", "__spec__") if name in main}
    main["__spec__"] = None  # multiprocessing asks for it
    try:
        yield
    finally:
        main.update(held)


def exit_with_parent() -> None:
    """Ends this multiprocessing process once the process that started it is gone.

    It cannot watch the parent's process id, because a forked worker's parent is the fork server, which lives
    as long as the worker. Nor can it watch a queue: the worker holds both ends.
    """

    def end_after_parent() -> None:
        if (parent := multiprocessing.parent_process()) is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=end_after_parent, daemon=True, name="parent-watch").start()


@contextmanager
def exit_on_signal() -> Iterator[None]:
    """Ends this process at once on a signal or the loss of a launcher, as long as there is nothing to save."""

    def end() -> NoReturn:
        _end_now(INTERRUPTED, EXIT_REQUEUE)

    if early_signal():
        end()
    over = threading.Event()
    _watch_launchers(lambda reason: end(), over.is_set)
    try:
        with handling((signal.SIGTERM, signal.SIGUSR1), lambda number, frame: end()):
            yield
    finally:
        over.set()


def _watch_launchers(then: Callable[[str], object], over: Callable[[], bool]) -> None:
    """Starts a thread that calls `then` with a reason once a launcher is gone; the thread ends when `over()`."""
    launchers = find_launchers()

    def watch() -> None:
        # is_running() compares creation times, so it detects a reused pid.
        while not over():
            for launcher in launchers:
                if not _alive(launcher):
                    then(f"launcher {launcher.pid} ended")
                    return
            threading.Event().wait(_POLL_S)

    if launchers:
        threading.Thread(target=watch, daemon=True, name="launcher-watch").start()


def _end_now(line: str, code: int = EXIT_INTERRUPTED) -> NoReturn:
    """Ends this process at once, which is safe: files on disk are complete at any moment.

    An exception could surface anywhere, inside an import or a library's thread, or be swallowed.
    """
    _say(line)
    os._exit(code)


def _say(line: str) -> None:
    """Prints from a signal handler, which must not use buffered writing; once on each node."""
    if is_local_rank_zero():
        os.write(2, f"\n{line}\n".encode())


def is_local_rank_zero() -> bool:
    """Returns whether this rank prints for its node; reads only the environment, so it works at any time."""
    names = (PLACE_ON_NODE, "LOCAL_RANK", "SLURM_LOCALID")
    return next((os.environ[name] for name in names if name in os.environ), "0") == "0"


def early_signal() -> str | None:
    """Returns the name of the first signal since `install_early_handlers`, if any."""
    return _heard_early[0] if _heard_early else None


class StopRequest:
    """A flag that SIGTERM, SIGUSR1, Ctrl-C, a closed terminal or the loss of a launcher sets.

    A step puts the flag into its report when it begins, and ranks read the report one step late. So a run takes at
    most two more steps after the one in which the signal arrives. All ranks agree before any leaves. SIGTERM to the
    `deepspeed` runner kills only the runner, so a thread watches the launchers above this process.
    """

    def __init__(self, again: str = "the same command") -> None:
        """Starts to listen; `again` is what resumes the run, for messages."""
        self.reason, self._again = early_signal(), again
        self._ended, self._asked = False, self.reason == "SIGINT"
        # Python lets only the main thread handle signals.
        if threading.current_thread() is threading.main_thread():
            handler = self._hear_in_thread()
            for number in STOP_SIGNALS:
                # Under nohup a closed terminal must stop nothing.
                if signal.getsignal(number) != signal.SIG_IGN:
                    signal.signal(number, handler)
        _watch_launchers(self._stop_for, lambda: self.reason is not None or self._ended)

    def __bool__(self) -> bool:
        return self.reason is not None

    def end(self) -> None:
        """Ends the watch and ignores further signals; call it once the run is saved and this rank leaves.

        When one rank leaves, the launcher signals the others. Python restores the default handlers at
        shutdown, so such a signal would kill this rank and change its exit code.
        """
        self._ended = True
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)

    def _hear_in_thread(self) -> Handler:
        """Starts a thread that acts on signals at once; returns a handler that does nothing.

        Python runs handlers between operations of the main thread, and an operation, such as a backward pass, may
        take a minute. Python's C handler writes each signal to a pipe at once, and the thread reads it.
        """
        heard, told = os.pipe()
        os.set_blocking(told, False)
        signal.set_wakeup_fd(told, warn_on_full_buffer=False)

        def leave_to_thread(number: int, frame: FrameType | None) -> None:
            pass

        def listen() -> None:
            while True:
                number = os.read(heard, 1)[0]
                # False after `end`.
                if signal.getsignal(number) is leave_to_thread:
                    self._on_signal(number)

        threading.Thread(target=listen, daemon=True, name="signals").start()
        return leave_to_thread

    def _on_signal(self, number: int) -> None:
        if number == signal.SIGINT:
            if self._asked:
                _end_now(f"interrupted without saving; {self._again} resumes from the last checkpoint")
            _say("stopping after at most two more steps, and saving; Ctrl-C again ends without saving")
            self._asked = True
        self.reason = self.reason or signal.Signals(number).name

    def _stop_for(self, reason: str) -> None:
        self.reason = self.reason or reason


def find_launchers() -> list[psutil.Process]:
    """Returns the unbroken chain of launcher processes above this one, nearest first."""
    chain = []
    for ancestor in psutil.Process().parents():
        try:
            name, words = ancestor.name(), ancestor.cmdline()
        except psutil.Error:
            break
        # torchrun's process calls itself pt_elastic: look at what was started, Python's script or module.
        started = [f"{Path(word).name}." for word in words if not word.startswith("-")]
        program = next((word for word in started if not word.startswith("python")), "")
        if name not in _LAUNCHERS and not program.startswith(_DOTTED):
            break
        chain.append(ancestor)
    return chain


def _alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
