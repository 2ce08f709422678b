"""Jobs on the test cluster: submitted, watched, cancelled."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from helpers.commands import ROOT

SCRIPT = Path(__file__).with_name("cluster.sh")
# Says where each rank is, and keeps it to one core: each node believes that it has all of this machine's.
ONE_CORE = """container=(bash -c 'echo "rank $SLURM_PROCID is on $SLURMD_NODENAME"
  exec taskset --cpu-list $((SLURM_NODEID % $(nproc --all))) "$@"' -)"""
ENDS = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
# Generous: the machine may be busy.
PATIENCE_S = 300


class Cluster:
    """Two nodes and a login node, held by `cluster.sh`."""

    def __init__(self, folder: Path) -> None:
        self._environment = os.environ | {"CLUSTER_DIR": str(folder)}
        self.jobs: list[Job] = []

    def call(self, *words: str, **options) -> str:
        """Calls cluster.sh; returns what it says."""
        ended = subprocess.run(
            [str(SCRIPT), *words],
            capture_output=True,
            text=True,
            cwd=ROOT,
            timeout=180,
            env=self._environment | options,
        )
        assert ended.returncode == 0, f"{' '.join(words)}: {ended.stdout}{ended.stderr}"
        return ended.stdout.strip()

    def submit(self, folder: Path, *words: str, site: str = "") -> "Job":
        """Submits a script of ours, whose output goes beside the folder of its run.

        Args:
            folder: of the run.
            words: sbatch's options, the script and what it takes.
            site: settings beyond the environment of the tests.
        """
        settings = folder.with_suffix(".site.sh")
        activate = Path(sys.executable).with_name("activate")
        settings.write_text(f"source {activate}\nnotes={folder}.notes\n{ONE_CORE}\n{site}\n")
        log = folder.with_suffix(".out")
        number = self.call(
            "run", "sbatch", "--parsable", f"--output={log}", *words, MAE_VIT_SITE=str(settings)
        )
        self.jobs.append(Job(self, number, log))
        return self.jobs[-1]


class Job:
    """A submitted job."""

    def __init__(self, cluster: Cluster, number: str, log: Path) -> None:
        self.number, self.log, self._cluster = number, log, cluster

    def output(self) -> str:
        """All that it has said, over its restarts."""
        return self.log.read_text() if self.log.exists() else ""

    def shown(self, field: str) -> str:
        """A field of what Slurm knows of it: JobState, Restarts."""
        text = self._cluster.call("run", "scontrol", "show", "job", self.number)
        matched = re.search(rf"\b{field}=(\S+)", text)
        assert matched, text
        return matched[1]

    def tell_of_limit(self) -> None:
        """Sends what --signal=B:USR1 sends before the time limit."""
        self._cluster.call("run", "scancel", "--batch", "--signal=USR1", self.number)

    def cancel(self) -> None:
        self._cluster.call("run", "scancel", self.number)

    def has_ended(self) -> bool:
        return self.shown("JobState") in ENDS

    def wait_for(self, text: str) -> None:
        """Waits until it has said `text`."""
        self.wait_until(lambda: text in self.output(), f'"{text}"')

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        """Waits for something that comes before its end."""
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            in_vain = time.monotonic() > deadline or (self.has_ended() and not condition())
            assert not in_vain, f"job {self.number}, waiting for {what}:\n{self.output()}"
            time.sleep(0.1)

    def wait(self) -> str:
        """Waits until it has ended, over all restarts; returns how."""
        deadline = time.monotonic() + PATIENCE_S
        while not self.has_ended():
            assert time.monotonic() < deadline, f"job {self.number} does not end:\n{self.output()}"
            time.sleep(1)
        return self.shown("JobState")
