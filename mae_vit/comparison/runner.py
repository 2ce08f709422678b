"""Runs jobs in parallel, each in its own process."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import runpy
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import BinaryIO, TypeVar

import torch
from tqdm import tqdm

from mae_vit.comparison.spec import RunSpec
from mae_vit.core.errors import EXIT_INTERRUPTED, EXIT_REQUEUE, InputError
from mae_vit.core.messages import count_of, format_duration
from mae_vit.runtime.cores import cores_of_rank
from mae_vit.runtime.signals import STOP_SIGNALS, blocked, exit_with_parent, without_main
from mae_vit.training.engines.precision import AUTO_PRECISION, Precision
from mae_vit.training.outputs.run_folder import RUN_ID

_T = TypeVar("_T")
# Seconds between checks of the running jobs.
_POLL_S = 0.5
# Seconds between checks for runs that can begin: other processes also start and finish them.
_LOOK_AGAIN_S = 5.0
# What every job imports. This takes longer than a short job, so a server imports it once and forks the jobs.
PRELOADED = [
    *("mae_vit.comparison.runner", "mae_vit.cli.main"),
    *("mae_vit.pretraining.job", "mae_vit.finetuning.job", "torch._dynamo"),
]
# Exit codes of jobs that a signal stopped.
_STOPPED = (EXIT_REQUEUE, EXIT_INTERRUPTED, *(-number for number in STOP_SIGNALS))
# Exit code that multiprocessing reports for a process whose server has ended.
_SERVER_GONE = 255
_LIBRARY = Path(__file__).resolve().parents[2]


class Bar:
    """One bar over all runs of a comparison, in FLOPs."""

    def __init__(self, specs: Sequence[RunSpec]) -> None:
        """Counts `specs`."""
        # tqdm's own lock is a semaphore of the system, which Ctrl-C leaves to Python's warning.
        tqdm.set_lock(threading.RLock())
        self._specs = specs
        self._first: dict[RunSpec, float] = {}  # work done when first read
        self._done: dict[RunSpec, tuple[float, float]] = {}
        self._bar = tqdm(
            total=1.0,
            unit="",
            dynamic_ncols=True,
            bar_format="{desc}: {percentage:3.0f}%|{bar}| {elapsed}<{remaining}{postfix}",
            # One line a minute when written to a file.
            mininterval=0.5 if sys.stderr.isatty() else 60,
            miniters=0,
            # Runs differ in speed: take the mean rate of this process.
            smoothing=0,
        )

    def show(self, running: Sequence[RunSpec], *, waits: bool = False) -> None:
        """Reads the progress of all runs; `waits` tells whether there is more to run."""
        works = {spec: self._work(spec) for spec in self._specs}
        known = [work[1] for work in works.values() if work and work[1]] or [1.0]
        # A run of unknown length counts as the mean.
        mean = sum(known) / len(known)
        whole = sum(work[1] if work else mean for work in works.values()) or 1.0
        so_far = {spec: work[0] if work else 0.0 for spec, work in works.items()}
        # Leave the work of earlier processes out of the rate.
        self._first = so_far | self._first
        self._bar.initial = sum(min(self._first[spec], done) for spec, done in so_far.items()) / whole
        done = sum(work is not None and work[0] == work[1] for work in works.values())
        self._bar.set_description_str(f"{done}/{len(works)} runs", refresh=False)
        names = ", ".join(spec.name for spec in running)
        self._bar.set_postfix_str(names or ("waiting for other processes" if waits else ""), refresh=False)
        self._bar.update(max(0.0, min(sum(so_far.values()) / whole, 1.0)) - self._bar.n)

    def say(self, text: str) -> None:
        """Writes a line above the bar, with how far the runs are."""
        done, passed = len(self._done), format_duration(self._bar.format_dict["elapsed"])
        counts = f"{done} of {count_of(len(self._specs), 'run')} done after {passed}"
        tqdm.write(f"{text} ({counts})", file=sys.stderr)

    def _work(self, spec: RunSpec) -> tuple[float, float] | None:
        """Reads a run's work; finished runs only once."""
        work = self._done.get(spec) or spec.work()
        if work is not None and work[0] == work[1]:
            self._done[spec] = work
        return work

    def close(self) -> None:
        """Closes the bar, which stays."""
        self._bar.close()


@dataclass
class _Running:
    spec: RunSpec
    process: BaseProcess
    slot: int
    claim: BinaryIO


@dataclass
class Runner:
    """Runs specs in slots, each with a GPU or a share of the cores.

    Attributes:
        precision: what `train.precision=auto` means for all runs.
        failed: exit code and last line of output, by name of the failed run.
        stopped: the signal that stopped the comparison; None if there was none.
    """

    slots: int
    precision: Precision = "fp32"
    failed: dict[str, str] = field(default_factory=dict)
    stopped: str | None = None

    def run(self, specs: Sequence[RunSpec], bar: Bar) -> None:
        """Runs all unfinished specs. After a stop request the running ones save and end.

        A run begins, in order, once the runs that it needs are done; it fails if one of them fails. Several processes
        may run the same specs, even on several machines with the same folders; a lock gives each run to one process.
        """
        waiting = [spec for spec in specs if not spec.is_done()]
        running, news = list[_Running](), list[str]()
        announced, look_at = False, 0.0
        try:
            while (waiting or running) and not (self.stopped and not running):
                if time.monotonic() >= look_at and not self.stopped:
                    before = len(running)
                    self._fill(waiting, running)
                    news += [f"begins  {item.spec.name}" for item in running[before:]]
                    look_at = time.monotonic() + _LOOK_AGAIN_S
                if self.stopped and not announced:
                    announced = True
                    for item in running:
                        item.process.terminate()
                for item in [item for item in running if item.process.exitcode is not None]:
                    running.remove(item)
                    self._finish(item)
                    if item.spec.is_done():
                        news.append(f"ends    {item.spec.name}: {item.spec.describe_result()}")
                    look_at = 0.0
                bar.show([item.spec for item in running], waits=bool(waiting) and not self.stopped)
                while news:
                    bar.say(news.pop(0))
                time.sleep(_POLL_S)
        finally:
            for item in running:
                item.process.kill()

    def stop(self, reason: str) -> None:
        """Requests a stop: no further run begins, and running ones save."""
        self.stopped = self.stopped or reason

    def _fill(self, waiting: list[RunSpec], running: list[_Running]) -> None:
        for slot in sorted(set(range(self.slots)) - {item.slot for item in running}):
            if (taken := self._take(waiting)) is None:
                return
            running.append(self._start(*taken, slot))

    def _take(self, waiting: list[RunSpec]) -> tuple[RunSpec, list[str], BinaryIO] | None:
        """Claims the first run that can begin; returns it with its command, or None if no run can begin now."""
        # Many runs need the same runs: read each summary once.
        finished = {need for need in {need for spec in waiting for need in spec.needs} if need.is_done()}
        for spec in list(waiting):
            # Without the failed run it would be another experiment.
            needs = (*spec.needs, *(spec.equal_compute or ()))
            if failed := next((need.name for need in needs if need.name in self.failed), None):
                waiting.remove(spec)
                self.failed[spec.name] = f"it needs {failed}, which failed"
                continue
            if not finished.issuperset(spec.needs) or (claim := spec.claim()) is None:
                continue
            waiting.remove(spec)
            try:
                if not spec.is_done():
                    return spec, spec.command(), claim
            except InputError as error:
                self.failed[spec.name] = str(error)
            claim.close()  # another process has just finished it, or its length is not known
        return None

    def _start(self, spec: RunSpec, command: Sequence[str], claim: BinaryIO, slot: int) -> _Running:
        environment = {**os.environ, AUTO_PRECISION: self.precision, RUN_ID: spec.id}
        if gpus := own_gpus():
            environment["CUDA_VISIBLE_DEVICES"] = gpus[slot % len(gpus)]
        ignored = [number for number in STOP_SIGNALS if signal.getsignal(number) == signal.SIG_IGN]
        cores = cores_of_slot(slot, self.slots)
        process = _context().Process(
            target=_run_job, args=(command[1:], spec.log, environment, cores, ignored)
        )
        spec.log.touch()
        with without_main(), blocked(STOP_SIGNALS), as_in_slot(environment, cores):
            process.start()
        return _Running(spec, process, slot, claim)

    def _finish(self, item: _Running) -> None:
        code, spec = item.process.exitcode, item.spec
        if code == _SERVER_GONE:
            # The job itself still runs, and nothing would wait for it.
            with suppress(ProcessLookupError):
                os.kill(item.process.pid or 0, signal.SIGKILL)
        item.claim.close()
        # A signal kills a job that does not handle signals yet, and Ctrl-C reaches jobs directly.
        if spec.is_done() or (code in _STOPPED and self.stopped):
            return
        lines = [line for line in spec.log.read_text(errors="replace").splitlines() if line.strip()]
        self.failed[spec.name] = f"exit {code}: {lines[-1] if lines else 'no output'} ({spec.log})"
        tqdm.write(f"failed: {spec.name}: {self.failed[spec.name]}", file=sys.stderr)


def count_slots(parallel: int | str) -> int:
    """Returns the number of parallel runs: as asked, else one per GPU, or without GPUs one per core."""
    if isinstance(parallel, int):
        return parallel
    return len(own_gpus()) or cores_of_rank()


def own_gpus() -> list[str]:
    """Returns the names of the GPUs or MIG slices that this process may use, as in CUDA_VISIBLE_DEVICES."""
    count = torch.cuda.device_count()
    names = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    # CUDA shows a process only the first slice, but other processes may use the rest.
    slices = [name for name in names if name.startswith("MIG-")]
    if count and slices:
        return slices
    return names[:count] if names[0] else [str(number) for number in range(count)]


def apart(function: Callable[..., _T], *arguments: object) -> _T | None:
    """Calls a function in a process that starts as a run does; returns None if it fails, but raises its InputError.

    What it opens, such as a GPU or a server of data workers, does not stay in this process.
    """
    with ProcessPoolExecutor(1, _context(), exit_with_parent) as pool:
        with without_main(), blocked(STOP_SIGNALS):
            answer = pool.submit(function, *arguments)
        try:
            return answer.result()
        except InputError:
            raise
        except Exception:
            return None


def _context() -> SpawnContext | ForkServerContext:
    """Returns how jobs start: forked by a server, or spawned. After a fork, a GPU that the server touched is unusable.

    A job's data workers have their own server.
    """
    if not sys.platform.startswith("linux") or own_gpus():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    here = os.getcwd()
    # The server imports from its working folder: this library, not another installed checkout.
    os.chdir(_LIBRARY)
    try:
        # Ctrl-C and a scheduler's signals are for the jobs, not for the server that forks them.
        with blocked(STOP_SIGNALS):
            forkserver.ensure_running()
    finally:
        os.chdir(here)
    return context


@contextmanager
def as_in_slot(environment: Mapping[str, str], cores: Sequence[int]) -> Iterator[None]:
    """Sets a job's environment and cores in this process, so that a spawned job has them from its start."""
    before, own = dict(os.environ), os.sched_getaffinity(0) if cores else set()
    os.environ.update(environment)
    if cores:
        os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
        if cores:
            os.sched_setaffinity(0, own)


def cores_of_slot(slot: int, slots: int) -> list[int]:
    """Returns a slot's cores; empty where the system does not bind processes to cores."""
    if not hasattr(os, "sched_getaffinity"):
        return []
    cores = sorted(os.sched_getaffinity(0))
    return cores[slot::slots] or [cores[slot % len(cores)]]


def _run_job(
    words: Sequence[str],
    log: Path,
    environment: Mapping[str, str],
    cores: Sequence[int],
    ignored: Sequence[signal.Signals],
) -> None:
    """Runs a script in this process, the job's own; its output goes to a file.

    The process has its own cores and one thread for each: more threads would slow all jobs. It dies with the
    comparison, so a restarted comparison never meets a job of the killed one.
    """
    atexit._clear()  # handlers of what the server has imported
    # The server may belong to data workers, which ignore signals.
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN if number in ignored else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    exit_with_parent()
    os.environ.clear()
    os.environ.update(environment)
    if cores:
        os.sched_setaffinity(0, cores)
    output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.close(output)
    sys.argv = list(words)
    try:
        runpy.run_path(words[0], run_name="__main__")
    finally:
        atexit._run_exitfuncs()  # processes of multiprocessing skip them
