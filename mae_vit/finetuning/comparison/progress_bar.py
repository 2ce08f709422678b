"""One progress bar over many jobs."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, MutableMapping
from pathlib import Path
from typing import Any

from tqdm import tqdm

from mae_vit.finetuning.comparison.jobs import Job


class _Eta(tqdm):
    """A bar whose `{eta}` is at least the time that the longest running job still takes.

    The mean rate alone would promise too little while few long jobs are left for many slots.
    """

    longest_s = 0.0

    @property
    def format_dict(self) -> MutableMapping[str, Any]:
        values = super().format_dict
        done, elapsed = values["n"] - values["initial"], values["elapsed"]
        if done > 0:
            left = max(elapsed * (values["total"] - values["n"]) / done, self.longest_s)
            values["eta"] = self.format_interval(left)
        else:
            values["eta"] = "?"
        return values


class Bar:
    """One bar over all jobs, those that are not known yet too; in FLOPs."""

    def __init__(self, jobs: list[Job], *, more: int = 0) -> None:
        """Counts `jobs` and `more` that come later."""
        self._jobs, self._more = jobs, more
        self._begun: dict[Path, float] = {}  # what was done of each when it was first looked at
        self._done: dict[Path, tuple[float, float]] = {}
        self._first_seen: dict[Path, tuple[float, float]] = {}  # of running jobs: when, and what was done
        self._bar = _Eta(
            total=1.0,
            unit="",
            dynamic_ncols=True,
            bar_format="{desc}: {percentage:3.0f}%|{bar}| {elapsed}<{eta}{postfix}",
            # In a file, a line a minute.
            mininterval=0.5 if sys.stderr.isatty() else 60,
            miniters=0,
            # Runs differ in speed: the mean over all that was done here.
            smoothing=0,
        )

    def add(self, jobs: Iterable[Job]) -> None:
        """Names jobs that were counted before."""
        added = list(jobs)
        self._jobs = self._jobs + added
        self._more = max(0, self._more - len(added))

    def show(self, running: list[Job], *, waits: bool = False) -> None:
        """Reads how far all are; `waits` tells whether there is more to run."""
        works = [self._work(job) for job in self._jobs]
        known = [total for _, total in filter(None, works) if total] or [1.0]
        # A run reports its work when it begins; before that it counts as the mean run, and scoring as the least.
        mean, least = sum(known) / len(known), min(known)
        totals = [
            work[1] if work else least if job.scores else mean
            for job, work in zip(self._jobs, works, strict=True)
        ]
        whole = (sum(totals) + self._more * mean) or 1.0
        share = sum(work[0] for work in works if work) / whole
        # Work of earlier processes is not part of the rate.
        so_far = {job.folder: work[0] if work else 0.0 for job, work in zip(self._jobs, works, strict=True)}
        self._begun = so_far | self._begun
        self._bar.initial = sum(min(self._begun[folder], done) for folder, done in so_far.items()) / whole
        done = sum(work is not None and work[0] == work[1] for work in works)
        self._bar.set_description_str(f"{done}/{len(works) + self._more} runs", refresh=False)
        names = ", ".join(job.name for job in running)
        self._bar.longest_s = max(map(self._left_s, running), default=0.0)
        self._bar.set_postfix_str(names or ("waiting for other processes" if waits else ""), refresh=False)
        self._bar.update(max(0.0, min(share, 1.0)) - self._bar.n)

    def _left_s(self, job: Job) -> float:
        """Estimates the seconds that a running job still takes; 0 before it has done anything."""
        done, total = self._work(job) or (0.0, 0.0)
        since, at_first = self._first_seen.setdefault(job.folder, (time.monotonic(), done))
        if done <= at_first:
            return 0.0
        return (time.monotonic() - since) * (total - done) / (done - at_first)

    def _work(self, job: Job) -> tuple[float, float] | None:
        """Reads finished cells once: a matrix may have hundreds."""
        if job.folder in self._done:
            return self._done[job.folder]
        work = job.work()
        if work is not None and work[0] == work[1]:
            self._done[job.folder] = work
        return work

    def close(self) -> None:
        """Leaves the bar as it is."""
        self._bar.close()
