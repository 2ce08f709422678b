"""Jobs in processes of their own, each with a time limit: what one breaks, the others do not notice."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from benchmarks.gpu.lines import FAILED, Lines
from benchmarks.gpu.telemetry import Telemetry
from mae_vit.runtime.signals import exit_with_parent

Emit = Callable[[str, dict[str, Any]], None]
# What a process sends when it ends by itself: a key that no figure has.
_END = ""
# With less time left nothing is begun: a process needs some seconds to import what it measures.
_LEAST_S = 15.0


@dataclass(frozen=True)
class Job:
    """Some figures that one process measures.

    Attributes:
        name: for people.
        keys: of the figures.
        measure: takes the keys that are wanted, and what takes each figure; picklable.
        limit_s: seconds after which the process is killed.
    """

    name: str
    keys: tuple[str, ...]
    measure: Callable[[frozenset[str], Emit], None]
    limit_s: float = 120.0


@dataclass(frozen=True)
class Account:
    """How a part went.

    Attributes:
        failed: keys without a figure, or with one beyond its bound, and the reasons.
        left: keys for which no time was left.
    """

    failed: dict[str, str]
    left: list[str]


def run_jobs(jobs: Sequence[Job], lines: Lines, *, limit_s: float) -> Account:
    """Runs jobs one after the other until the part's time is over; figures that are there are skipped."""
    until = time.monotonic() + limit_s
    failed: dict[str, str] = {}
    left: list[str] = []
    for job in jobs:
        known = lines.known()
        wanted = frozenset(key for key in job.keys if key not in known)
        if not wanted:
            _say(lines, job.name, "there already")
            continue
        if until - time.monotonic() < min(_LEAST_S, job.limit_s):
            left += [key for key in job.keys if key in wanted]
            continue
        failed |= _run(job, wanted, lines, until)
    return Account(failed, left)


def _run(job: Job, wanted: frozenset[str], lines: Lines, until: float) -> dict[str, str]:
    """Runs a job's process, and writes each figure down as it comes; returns what failed."""
    missing = [key for key in job.keys if key in wanted]
    seconds = min(job.limit_s, until - time.monotonic())
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_live, args=(job, wanted, theirs))
    begun, problem, failed = time.monotonic(), "", dict[str, str]()
    _say(lines, job.name, f"begun, at most {seconds:.0f} s")
    with Telemetry() as telemetry:
        process.start()
        theirs.close()
        try:
            while pipe.poll(max(0.0, begun + seconds - time.monotonic())):
                key, values = pipe.recv()
                if key == _END:
                    problem = values.get(FAILED, "")
                    process.join(timeout=10)
                    break
                if values.get("met") is False:
                    failed[key] = "it is not what it is to be"
                lines.append(key, {**values, **telemetry.since_last(), "after_s": _since(begun)})
                _say(lines, key, _short(values))
                missing = [one for one in missing if one != key]
            else:
                problem = f"not measured within {seconds:.0f} s"
        except EOFError:
            process.join()
            problem = f"its process ended with exit code {process.exitcode}"
        finally:
            _end(process)
    reason = problem or "its process ended without this figure"
    for key in missing:
        lines.append(key, {FAILED: reason, "after_s": _since(begun)})
        _say(lines, key, f"{FAILED}: {reason}")
    return failed | dict.fromkeys(missing, reason)


def _live(job: Job, wanted: frozenset[str], pipe: Connection) -> None:
    """The life of a job's process, which leads a group: its data workers and compilers end with it."""
    os.setpgid(0, 0)
    exit_with_parent()
    # What libraries print is no figure: all of it goes where progress goes.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    result: dict[str, Any] = {}
    try:
        job.measure(wanted, lambda key, values: pipe.send((key, values)))
    except BaseException as error:
        traceback.print_exc()
        result = {
            FAILED: f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
        }
    pipe.send((_END, result))


def _end(process: BaseProcess) -> None:
    """Ends a process and all that it started."""
    assert process.pid is not None
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.join()


def _since(begun: float) -> float:
    return round(time.monotonic() - begun, 1)


def _short(values: dict[str, Any]) -> str:
    """A figure's numbers and words, for the eye."""
    shown = {name: value for name, value in values.items() if not isinstance(value, list | dict)}
    return ", ".join(f"{name} {value}" for name, value in shown.items())


def _say(lines: Lines, key: str, text: str) -> None:
    print(f"{lines.part}: {key}: {text}", file=sys.stderr, flush=True)
