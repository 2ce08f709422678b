"""The run folder: the files of a run.

`config.yaml`, `environment.json`, `metrics.jsonl`, `tensorboard/`, `checkpoints/`,
`pictures/`, `incidents/`, `encoder.safetensors`, `summary.json`, `plan.txt`; with fine-tuning `results.json`,
`predictions.csv` and `test_reads.json`; with damaged samples `quarantine.jsonl`; with experiment
trackers `trackers.json`.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO, Literal

from mae_vit.config.schema import Config
from mae_vit.core.errors import InputError
from mae_vit.core.files import nearest_existing, to_json, write_atomically, write_json
from mae_vit.core.messages import error_reason
from mae_vit.core.urls import WRITABLE_SCHEMES, check_url, is_url
from mae_vit.runtime.locks import is_locked, try_lock
from mae_vit.training.checkpoints.checkpoint import CheckpointInfo, list_checkpoints
from mae_vit.training.checkpoints.remote import RemoteRun

Status = Literal["running", "interrupted", "done", "failed"]
# Environment variable by which a comparison identifies its runs; `summary.json` records it as `run_id`.
RUN_ID = "MAE_VIT_RUN_ID"
# Long enough for the ranks of a killed launcher to finish a step, save and exit.
_WAIT_S = 20.0
# A network file system frees the locks of a machine that crashed after its lease (NFS: 90 s).
_WAIT_FOR_OTHERS_S = 120.0
_POLL_S = 0.2
_LOCK = ".lock"
# What the start of a run writes or removes.
_REPLACED = (
    *("config.yaml", "model.safetensors", "linear.safetensors", "encoder.safetensors"),
    *("results.json", "predictions.csv", "test_reads.json", "overlays.png", "metrics.jsonl"),
    *("quarantine.jsonl", "trackers.json", "summary.json", "plan.txt"),
    *("tensorboard", "pictures", "incidents"),
)
_WAIT_OR_STOP = "wait or stop it (SIGTERM saves)"


class RunFolder:
    """Paths and files of one run; only rank 0 writes.

    Attributes:
        remote: the folder behind a URL whose local copy this is; None without one.
        again: what resumes the run, for messages.
        replaces: whether an earlier run here counts as none, and `lock` moves it aside.
    """

    def __init__(self, path: Path, remote: RemoteRun | None = None) -> None:
        self.path, self.remote = path, remote
        self.checkpoints = path / "checkpoints"
        self.tensorboard = path / "tensorboard"
        self.pictures = path / "pictures"
        self.incidents = path / "incidents"
        self.metrics = path / "metrics.jsonl"
        self.quarantine = path / "quarantine.jsonl"
        self.trackers = path / "trackers.json"
        self.encoder = path / "encoder.safetensors"
        self.summary = path / "summary.json"
        self.plan = path / "plan.txt"
        self._environment = path / "environment.json"
        self.replaces, self.again = False, "the same command"
        self._lock: BinaryIO | None = None
        self._facts: dict[str, bytes] | None = None

    @classmethod
    def from_config(cls, config: Config) -> RunFolder:
        """Names `run.dir`, or the local copy if it is a URL, or runs/NAME without one; raises InputError."""
        if config.run.dir is not None and is_url(config.run.dir):
            check_url(config.run.dir, key="run.dir", schemes=WRITABLE_SCHEMES)
            remote = RemoteRun(config.run.dir)
            return cls(remote.local, remote)
        return cls(Path(config.run.dir or Path("runs") / config.run.name))

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *error: object) -> None:
        self.unlock()

    def check_writable(self) -> None:
        """Raises InputError if the folder cannot be created or written; leaves nothing behind."""
        existing = nearest_existing(self.path)
        if not existing.is_dir():
            raise InputError(f"run folder {self.path}: {existing} is not a folder; give run.dir=FOLDER")
        probe = existing / f".writable.{os.getpid()}"
        try:
            probe.touch()
            probe.unlink(missing_ok=True)
        except OSError as error:
            reason = error_reason(error)
            raise InputError(
                f"run folder {self.path} cannot be written: {existing}: {reason}; give run.dir"
            ) from None
        theirs = next((name for name in _REPLACED if (self.path / name).exists()), None)
        if theirs and self.remote is None and not self.is_run:
            raise InputError(
                f"{self.path} is no run folder, and a run would replace its {theirs}; give run.dir=FOLDER"
            )

    @property
    def is_run(self) -> bool:
        """Whether a run has begun here."""
        return self._environment.exists() or bool(list_checkpoints(self.checkpoints))

    def shown(self, text: object = None) -> str:
        """Returns the folder, or a text that names it, for messages: with the URL if there is one."""
        shown = str(text or self.path)
        return shown.replace(str(self.path), self.remote.shown) if self.remote else shown

    @property
    def otherwise(self) -> str:
        """What to do if the folder has another run, for messages."""
        over = "" if self.remote else ", or start over with `--resume never`, which moves the old run aside"
        return f"give another run.dir{over}"

    def foresee(self) -> None:
        """Reads config and summary behind the URL for a plan, which leaves the local copy alone; raises OSError."""
        self._facts = self.remote.read_facts() if self.remote else None

    def read(self, name: str) -> str:
        """Returns the text of config or summary, by its name; empty if there is none. Raises OSError."""
        if self._facts is not None:
            return self._facts.get(name, b"").decode()
        path = self.path / name
        return path.read_text() if path.exists() and not self.replaces else ""

    def bring(self, checkpoint: Path) -> Path:
        """Returns this node's folder of a checkpoint that rank 0 has; raises OSError."""
        return self.remote.bring(checkpoint) if self.remote else checkpoint

    def has(self, checkpoint: CheckpointInfo | None) -> bool:
        """Returns whether a checkpoint is the run's own; only rank 0 knows, whose folder the path names."""
        return checkpoint is not None and checkpoint.path.parent.resolve() == self.checkpoints.resolve()

    def upload(self) -> None:
        """Uploads the changed files of a run with a URL, without checkpoints; raises OSError."""
        if self.remote:
            self.remote.upload_files()

    def lock(self) -> None:
        """Locks the folder by `lock_run` until `unlock` or the process ends; first moves a replaced run to NAME.N."""
        if self.replaces:
            path = self.path.resolve()
            names = (path.with_name(f"{path.name}.{number}") for number in count(1))
            moved = next(name for name in names if not name.exists())
            path.rename(moved)
            path.mkdir()  # a link to it stays one
            print(f"moved the earlier run {self.path} to {moved}")
            self.replaces = False
            self.unlock()
        self._lock = self._lock or lock_run(self.path)

    def unlock(self) -> None:
        """Releases the lock, if there is one."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def describe_user(self) -> str:
        """Says which process trains here now, and what to do; empty if none does."""
        lock = self.path / _LOCK
        return (
            f"{self.shown()} is in use by {_read_holder(lock)[0]}; {_WAIT_OR_STOP}" if is_locked(lock) else ""
        )

    def create(self, config_yaml: str, environment: dict[str, Any], plan: str = "") -> None:
        """Creates the folder and writes the files that describe the run; `plan` is the output of `--dry-run`."""
        self.path.mkdir(parents=True, exist_ok=True)
        write_json(self._environment, environment)  # first, since `is_run` looks for it
        write_atomically(self.path / "config.yaml", config_yaml.encode())
        if plan:
            write_atomically(self.plan, (plan + "\n").encode())

    def read_summary(self) -> dict[str, Any]:
        """Returns `summary.json`; empty if there is none."""
        try:
            summary = json.loads(self.read(self.summary.name))
        except (OSError, ValueError):
            return {}
        return summary if isinstance(summary, dict) else {}

    def read_status(self) -> Status | None:
        """Returns the status in `summary.json`; None if there is no run."""
        status = self.read_summary().get("status")
        return status if status in ("running", "interrupted", "done", "failed") else None

    def write_summary(self, status: Status, values: dict[str, Any]) -> None:
        """Replaces `summary.json`."""
        identity = {"run_id": run_id} if (run_id := os.environ.get(RUN_ID)) else {}
        write_json(self.summary, {"status": status, **identity, **values})

    def append_metrics(self, line: dict[str, Any]) -> None:
        """Appends a line to `metrics.jsonl`."""
        with self.metrics.open("ab+") as file:
            # Terminate a line that a full disk cut short.
            torn = file.tell() and (file.seek(-1, os.SEEK_END), file.read(1))[1] != b"\n"
            file.write((b"\n" if torn else b"") + (to_json(line) + "\n").encode())

    def cut_metrics(self, step: int) -> dict[str, Any] | None:
        """Drops lines after `step` and a torn last line, so that no step is written twice; returns the last line."""
        if not self.metrics.exists():
            return None
        last, end, read = None, 0, 0
        # In place: a full disk must not prevent a rollback.
        with self.metrics.open("rb+") as file:
            for line in file:
                read += len(line)
                try:
                    values = json.loads(line)
                except ValueError:  # cut short
                    continue
                if values["step"] > step:
                    break
                last, end = values, read
            file.truncate(end)
        return last


def lock_run(folder: Path) -> BinaryIO:
    """Locks a run folder for this process; creates it if needed. Raises InputError if it is in use or read-only."""
    path, begun, announced = folder / _LOCK, time.monotonic(), False
    while True:
        lock = None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = try_lock(path)
            if lock is not None:
                holder = {"host": socket.gethostname(), "pid": os.getpid(), "since": time.strftime("%F %T")}
                path.write_text(json.dumps(holder) + "\n")
                return lock
        except OSError as error:
            if lock is not None:
                lock.close()
            reason = error_reason(error)
            raise InputError(f"run folder {folder} cannot be written: {reason}") from None
        who, patience = _read_holder(path)
        if time.monotonic() - begun > patience:
            raise InputError(
                f"run folder {folder} is in use by {who}; {_WAIT_OR_STOP}, or give this run another run.dir"
            )
        if not announced:
            announced = True
            print(f"{folder} is in use by {who}; waiting {patience:.0f} s for it to end", file=sys.stderr)
        time.sleep(_POLL_S)


def _read_holder(path: Path) -> tuple[str, float]:
    """Returns a description of the lock's holder, and the seconds to wait for it."""
    try:
        holder = json.loads(path.read_text())
        host, who = holder["host"], f"process {holder['pid']} on {holder['host']} since {holder['since']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process", _WAIT_S
    return who, _WAIT_S if host == socket.gethostname() else _WAIT_FOR_OTHERS_S
