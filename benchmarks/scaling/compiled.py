"""Starts of `mae-vit pretrain` that compile, where the compiler's code is kept and where it is not.

Each start is a command in a process of its own, on the digits of scikit-learn. After its third step it gets SIGTERM,
saves and ends, as before a time limit. Every start has a new, empty folder for temporary files, as on another node.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.harness.turns import summarize
from mae_vit.core.errors import EXIT_REQUEUE
from mae_vit.data.prepare.prepare import prepare
from mae_vit.data.prepare.sources.find import find_images

CONFIG = "mae_digits"
# The run folder and the user's cache folder of each start, and `train.compile`. They take place in this order in each
# round, so a folder that a start shares with an earlier one is as that one left it.
STARTS = {
    "new run, not compiled": ("plain", "unused", "false"),
    "new run, empty cache": ("run", "first", "true"),
    "new run, filled cache": ("other", "first", "true"),
    "resumed, filled cache": ("run", "first", "true"),
    "resumed, empty cache": ("run", "second", "true"),
}
_OPTIONS = ("train.engine=torch", "monitor.log_every_steps=1", "monitor.probe_queries=0")


def measure_compiled_starts(scratch: Path, *, rounds: int) -> dict[str, Any]:
    """All kinds of starts in turn: seconds from the start of the interpreter to the end of the first and third step."""
    data = scratch / "digits"
    prepare([find_images("digits", out=data)], data)
    command = [sys.executable, "-m", "mae_vit.cli", "pretrain", CONFIG, *_OPTIONS, f"data.path={data}"]
    times: dict[str, list[list[float]]] = {name: [] for name in STARTS}
    for number in range(rounds):
        folder = scratch / f"compiled-{number}"
        for name, (run, cache, compiles) in STARTS.items():
            chosen = [f"run.dir={folder / run}", f"train.compile={compiles}"]
            times[name].append(time_start([*command, *chosen], folder / cache))
    by_start = {}
    for name, taken in times.items():
        firsts, thirds = zip(*taken, strict=True)
        by_start[name] = {"first_step_s": summarize(firsts, 1), "third_step_s": summarize(thirds, 1)}
    return {"config": CONFIG, "by_start": by_start}


def time_start(command: list[str], cache: Path) -> list[float]:
    """Starts a run, ends it after three steps, and returns the seconds to the end of the first and the third one."""
    with tempfile.TemporaryDirectory() as temporary:
        places = {"XDG_CACHE_HOME": str(cache), "TMPDIR": temporary, "OMP_NUM_THREADS": "1"}
        kept = {name: value for name, value in os.environ.items() if name != "TORCHINDUCTOR_CACHE_DIR"}
        begun, said, ends = time.monotonic(), [], list[float]()
        process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=kept | places
        )
        with process:
            assert process.stderr is not None
            for line in process.stderr:
                said.append(line)
                if re.match(r"step \d+/", line):
                    ends.append(time.monotonic() - begun)
                    if len(ends) == 3:
                        process.send_signal(signal.SIGTERM)
    if process.returncode != EXIT_REQUEUE:
        sys.exit(f"{' '.join(command)}\n{''.join(said)[-2000:]}")
    return [ends[0], ends[2]]
