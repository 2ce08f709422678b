"""Runs of other commands side by side: each in its process, one bar over all."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from finetune.comparison.inputs import describe_inputs, difference
from mae_vit.errors import InputError
from mae_vit.training.distributed import available_cores
from mae_vit.training.entry import EXIT_REQUEUE
from mae_vit.training.files import write_json
from mae_vit.training.run_folder import RunFolder

_POLL_S = 0.5
_ROOT = Path(__file__).resolve().parents[2]
_PR_SET_PDEATHSIG = 1
_WHAT = {
    "settings": "set of options",
    "config": "content of its config file",
    "start": "start (its weights are others)",
    "data": "content of its data folder",
}


@dataclass(frozen=True)
class Job:
    """One run.

    Attributes:
        name: for people.
        folder: of the run.
        script: `pretrain/run.py` or `finetune/run.py`.
        config: its file.
        arguments: of its command line, without config and folder.
        data: its shards.
        start: what it begins from, which is among the arguments too.
        notes: beside which its output and arguments are kept; beside the folder by default.
            A run whose folder is elsewhere may have been begun by others: it is always
            called, and says itself that it is finished, or another one.
    """

    name: str
    folder: Path
    script: str
    config: Path
    arguments: tuple[str, ...]
    data: Path
    start: str | None = None
    notes: Path | None = None

    @property
    def summary(self) -> dict[str, Any]:
        """What the run has said so far; empty before it begins."""
        try:
            told: dict[str, Any] = json.loads((self.folder / "summary.json").read_text())
        except (OSError, ValueError):
            return {}
        return told

    @property
    def log(self) -> Path:
        """Where its output goes."""
        return self._beside(".log")

    @property
    def _told(self) -> Path:
        return self._beside(".job.json")

    def is_done(self) -> bool:
        """Whether it has ended well.

        Raises:
            InputError: if the folder holds a run of something else.
        """
        if self.notes is not None or not self._told.exists():
            return False
        if what := difference(json.loads(self._told.read_text()), self._inputs()):
            raise InputError(
                f"{self.folder} was run with another {_WHAT[what]} than {self.name} has now: give the comparison "
                f"another run.name, or delete {self.folder} to run it again"
            )
        return RunFolder(self.folder).read_status() == "done"

    def remember(self) -> None:
        """Notes what it is made of, before it begins."""
        self._told.parent.mkdir(parents=True, exist_ok=True)
        write_json(self._told, self._inputs())

    def _inputs(self) -> dict[str, Any]:
        return describe_inputs(self.arguments, self.config, self.start, self.data)

    def _beside(self, suffix: str) -> Path:
        stem = self.notes or self.folder
        return stem.with_name(stem.name + suffix)

    def command(self) -> list[str]:
        """The command line."""
        return [
            sys.executable,
            str(_ROOT / self.script),
            "--config",
            str(self.config),
            *self.arguments,
            f"run.dir={self.folder}",
            "run.name=" + self.folder.name,
        ]

    def work(self) -> tuple[float, float] | None:
        """FLOPs done and in all; None before it says so."""
        told = self.summary
        total, flops = told.get("total_steps"), told.get("flops_per_step")
        if told.get("status") == "done" and not total:
            # Scored in one go: next to nothing, but a bar over such jobs alone has to move.
            return 1.0, 1.0
        if not total or not flops:
            return None
        if told["status"] == "done":
            return total * flops, total * flops
        return _last_step(self.folder / "metrics.jsonl") * flops, total * flops


@dataclass
class _Running:
    job: Job
    process: subprocess.Popen[bytes]
    slot: int


@dataclass
class Runner:
    """Runs jobs in slots: one for each GPU, or a share of the cores.

    Attributes:
        slots: jobs at a time.
        failed: names of jobs that failed, with the last line that they said.
        stopped: the signal that ended it all; None if none did.
    """

    slots: int
    failed: dict[str, str] = field(default_factory=dict)
    stopped: str | None = None
    _lost: set[str] = field(default_factory=set)

    def run(self, jobs: Iterable[Job], bar: Bar) -> None:
        """Runs all that are not done; when told to stop, those that run save and end.

        They begin in order, except that one whose start is the folder of another waits for
        it; if that one fails, it fails too.

        Raises:
            InputError: if a folder holds another run.
        """
        waiting = [job for job in jobs if not job.is_done()]
        running: list[_Running] = []
        told = False
        try:
            while (waiting or running) and not (self.stopped and not running):
                while len(running) < self.slots and not self.stopped:
                    job = self._take(waiting, running)
                    if job is None:
                        break
                    free = next(s for s in range(self.slots) if s not in {one.slot for one in running})
                    running.append(self._start(job, free))
                if self.stopped and not told:
                    told = True
                    for one in running:
                        one.process.terminate()
                for one in [one for one in running if one.process.poll() is not None]:
                    running.remove(one)
                    self._settle(one)
                bar.show([one.job for one in running])
                time.sleep(_POLL_S)
        finally:
            for one in running:
                one.process.kill()

    def stop(self, reason: str) -> None:
        """Asks for the end: no further job begins, those that run save."""
        self.stopped = self.stopped or reason

    def _take(self, waiting: list[Job], running: list[_Running]) -> Job | None:
        """Takes the first job whose start is there; None while all wait for others."""
        # Nothing begins from what failed, even if there is something: that would be another experiment.
        for job in [job for job in waiting if job.start in self._lost]:
            waiting.remove(job)
            self.failed[job.name] = f"its start {job.start} is not there"
        coming = {str(job.folder) for job in (*waiting, *(one.job for one in running))}
        for job in waiting:
            if job.start not in coming:
                waiting.remove(job)
                return job
        return None

    def _start(self, job: Job, slot: int) -> _Running:
        job.remember()
        environment = dict(os.environ)
        if gpus := torch.cuda.device_count():
            # Of those that this process may use itself.
            own = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(gpus)))
            environment["CUDA_VISIBLE_DEVICES"] = own.split(",")[slot % gpus]
        with job.log.open("ab") as log:
            process = subprocess.Popen(
                job.command(),
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=environment,
                cwd=os.getcwd(),
                preexec_fn=_settle_in(os.getpid(), slot, self.slots),
            )
        return _Running(job, process, slot)

    def _settle(self, one: _Running) -> None:
        code = one.process.returncode
        if code == 0 or (code == EXIT_REQUEUE and self.stopped):
            return
        lines = [line for line in one.job.log.read_text(errors="replace").splitlines() if line.strip()]
        said = lines[-1] if lines else "no output"
        self._lost.add(str(one.job.folder))
        self.failed[one.job.name] = f"exit {code}: {said} ({one.job.log})"
        tqdm.write(f"failed: {one.job.name}: {self.failed[one.job.name]}", file=sys.stderr)


class Bar:
    """One bar over all jobs, those that are not known yet too; in FLOPs."""

    def __init__(self, jobs: list[Job], *, more: int = 0) -> None:
        """Counts `jobs` and `more` that come later."""
        self._jobs, self._more = jobs, more
        self._begun: float | None = None
        self._done: dict[Path, tuple[float, float]] = {}
        self._bar = tqdm(
            total=1.0,
            unit="",
            dynamic_ncols=True,
            bar_format="{desc}: {percentage:3.0f}%|{bar}| {elapsed}<{remaining}{postfix}",
            # In a file, a line a minute.
            mininterval=0.5 if sys.stderr.isatty() else 60,
            miniters=0,
        )

    def add(self, jobs: Iterable[Job]) -> None:
        """Names jobs that were counted before."""
        added = list(jobs)
        self._jobs = self._jobs + added
        self._more = max(0, self._more - len(added))

    def show(self, running: list[Job]) -> None:
        """Reads how far all are."""
        works = [self._work(job) for job in self._jobs]
        known = [work for work in works if work is not None]
        unknown = len(works) - len(known) + self._more
        mean = sum(total for _, total in known) / len(known) if known else 1.0
        share = sum(done for done, _ in known) / (sum(total for _, total in known) + unknown * mean)
        if self._begun is None:
            # Of what earlier sittings did the bar's rate knows nothing.
            self._begun = share
            self._bar.initial = share
        share, before = max(0.0, min(share, 1.0)), self._bar.n
        done = sum(work is not None and work[0] == work[1] for work in works)
        self._bar.set_description_str(f"{done}/{len(works) + self._more} runs", refresh=False)
        self._bar.set_postfix_str(", ".join(job.name for job in running), refresh=False)
        self._bar.update(share - before)

    def _work(self, job: Job) -> tuple[float, float] | None:
        """What is finished is read once: a matrix may have hundreds of cells."""
        if job.folder in self._done:
            return self._done[job.folder]
        work = job.work()
        if work is not None and work[0] == work[1]:
            self._done[job.folder] = work
        return work

    def close(self) -> None:
        """Leaves the bar as it is."""
        self._bar.close()


def slots_of(parallel: int | str) -> int:
    """How many runs at a time: as asked, or one for each GPU, or for each core."""
    if isinstance(parallel, int):
        return parallel
    return torch.cuda.device_count() or available_cores()


def _last_step(metrics: Path) -> int:
    """The step of the newest line, read from the file's end."""
    try:
        with metrics.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 4096))
            lines = file.read().splitlines()
    except OSError:
        return 0
    for line in reversed(lines):
        try:
            return int(json.loads(line)["step"])
        except (ValueError, KeyError, TypeError):
            continue
    return 0


def _settle_in(parent: int, slot: int, slots: int) -> Callable[[], None] | None:
    """What a job does first, on Linux: takes its share of the cores, and ends with the comparison.

    With its own cores it starts as many threads as there are; of more threads than cores
    each waits for the others. A comparison that is killed outright and started again
    never meets a run of the earlier one.
    """
    if not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(None)
    cores = sorted(os.sched_getaffinity(0))
    own = cores[slot::slots] or [cores[slot % len(cores)]]

    def prepare() -> None:
        os.sched_setaffinity(0, own)
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)

    return prepare
