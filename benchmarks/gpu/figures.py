"""Figures of a part, a JSON line each as soon as it is known; what breaks one is noticed by no other."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mae_vit.core.files import read_json_lines, to_json
from mae_vit.runtime.signals import exit_with_parent

# A figure's name, and the picklable function that measures it. One process measures those of a group in turn.
Group = Mapping[str, Callable[[], dict[str, Any]]]
# After these seconds a group's process is ended.
LIMIT_S = 240.0
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


def measure(groups: Sequence[Group], lines: Lines, until: float) -> tuple[list[str], list[str]]:
    """Measures groups, one after the other, until `time.monotonic()` is `until`.

    Returns names of the figures that failed or are beyond their bounds, and of those for which no time was left.
    """
    failed: list[str] = []
    for number, group in enumerate(groups):
        if until - time.monotonic() < _LEAST_S:
            return failed, [key for later in groups[number:] for key in later]
        seconds = min(LIMIT_S, until - time.monotonic())
        before = len(read_json_lines(lines.path))
        process = multiprocessing.get_context("spawn").Process(target=_live, args=(group, lines))
        process.start()
        process.join(seconds)
        reason = f"its process ended with exit code {process.exitcode}"
        if process.exitcode is None:
            reason = f"not measured within {seconds:.0f} s"
        # All that it started too: data workers, compilers.
        assert process.pid
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.join()
        known = {line["key"]: line for line in read_json_lines(lines.path)[before:]}
        for key in group:
            if key not in known:
                lines.append(key, {"failed": reason})
            if key not in known or "failed" in known[key] or known[key].get("met") is False:
                failed.append(key)
    return failed, []


def _live(group: Group, lines: Lines) -> None:
    """The life of a process, which leads a group of processes."""
    os.setpgid(0, 0)
    exit_with_parent()
    # What libraries print is no figure.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    for key, take in group.items():
        begun = time.monotonic()
        try:
            values = take()
        except Exception as error:
            traceback.print_exc()
            values = {"failed": f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"}
        lines.append(key, {**values, "after_s": round(time.monotonic() - begun, 1)})
