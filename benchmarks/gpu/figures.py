"""Figures of a part, a JSON line each as soon as it is known; what breaks one is noticed by no other."""

from __future__ import annotations

import fnmatch
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

from filelock import FileLock

from mae_vit.core.files import read_json_lines, to_json
from mae_vit.runtime.signals import exit_with_parent

Values = dict[str, Any]
# A generator first makes itself ready beside the groups of its wave, yields nothing once, and then has the device to
# itself until it yields its values.
Figure = Values | Iterator[Values | None]
# A figure's name, and the picklable function that measures it. One process measures those of a group in turn.
Group = Mapping[str, Callable[[], Figure]]
# Groups whose processes begin together.
Wave = Sequence[Group]
# After these seconds the processes of a wave are ended.
LIMIT_S = 400.0
# Seconds that a figure which is ready waits for others.
_PATIENCE_S = 170.0
# With less time left nothing is begun: a process needs some seconds to import what it measures.
_LEAST_S = 15.0


@dataclass(frozen=True)
class Lines:
    """The file of a part: a line for each figure, which begins with `part` and ends with the facts `about`."""

    path: Path
    part: str
    about: Mapping[str, Any]

    def append(self, key: str, values: Mapping[str, Any]) -> None:
        """Writes a figure, and says it."""
        shown = {name: value for name, value in values.items() if not isinstance(value, list | dict)}
        print(f"{self.part}: {key}: {shown}", file=sys.stderr, flush=True)
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        line = {"part": self.part, "key": key, **values, **self.about, "time": now}
        with self.path.open("a") as file:
            file.write(to_json(line) + "\n")


def wanted(group: Group, patterns: Sequence[str]) -> Group:
    """A group's figures whose names fit a pattern."""
    return {key: group[key] for key in group if any(fnmatch.fnmatchcase(key, each) for each in patterns)}


def measure(waves: Sequence[Wave], lines: Lines, until: float) -> tuple[list[str], list[str]]:
    """Measures waves of groups, one after the other, until `time.monotonic()` is `until`.

    Returns names of the figures that failed or are beyond their bounds, and of those for which no time was left.
    """
    failed: list[str] = []
    context = multiprocessing.get_context("spawn")
    for number, wave in enumerate(waves):
        if until - time.monotonic() < _LEAST_S:
            return failed, [key for later in waves[number:] for group in later for key in group]
        seconds = min(LIMIT_S, until - time.monotonic())
        before = len(read_json_lines(lines.path))
        ready = [context.Event() for _ in wave]
        members = zip(wave, ready, strict=True)
        processes = [context.Process(target=_live, args=(group, lines, own, ready)) for group, own in members]
        for process in processes:
            process.start()
        end = time.monotonic() + seconds
        for process in processes:
            process.join(max(0.0, end - time.monotonic()))
        reasons = [
            f"not measured within {seconds:.0f} s"
            if process.exitcode is None
            else f"its process ended with exit code {process.exitcode}"
            for process in processes
        ]
        for process in processes:
            # All that it started too: data workers, compilers.
            assert process.pid
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            process.join()
        known = {line["key"]: line for line in read_json_lines(lines.path)[before:]}
        for group, reason in zip(wave, reasons, strict=True):
            for key in group:
                if key not in known:
                    lines.append(key, {"failed": reason})
                if key not in known or "failed" in known[key] or known[key].get("met") is False:
                    failed.append(key)
    return failed, []


def _live(group: Group, lines: Lines, own: Event, ready: Sequence[Event]) -> None:
    """The life of a process, which leads a group of processes."""
    os.setpgid(0, 0)
    exit_with_parent()
    # What libraries print is no figure.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    lock = Path(tempfile.gettempdir(), f"benchmark-{os.getppid()}.lock")
    for key, take in group.items():
        begun = time.monotonic()
        try:
            values = _values(take(), own, ready, lock)
        except Exception as error:
            traceback.print_exc()
            values = {"failed": f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"}
        lines.append(key, {**values, "after_s": round(time.monotonic() - begun, 1)})
    own.set()


def _values(figure: Figure, own: Event, ready: Sequence[Event], lock: Path) -> Values:
    if isinstance(figure, dict):
        return figure
    next(figure)
    own.set()
    end = time.monotonic() + _PATIENCE_S
    while not all(each.is_set() for each in ready) and time.monotonic() < end:
        time.sleep(0.1)
    # The system releases a file's lock when a process dies.
    with FileLock(lock):
        others = sum(not each.is_set() for each in ready)
        values = next(figure)
    assert values is not None
    return {**values, "others_compiled": others} if others else values
