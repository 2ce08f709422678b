"""The run folder: what a run leaves behind, readable by scripts and people.

`config.yaml`, `environment.json`, `metrics.jsonl`, `tensorboard/`, `checkpoints/`,
`pictures/`, `encoder.safetensors`, `summary.json`, `plan.txt`; `results.json`, `predictions.csv`,
`test_reads.json` and `rates.json` of fine-tuning; `quarantine.jsonl` where samples were damaged,
`trackers.json` where experiment trackers follow the run.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Literal

from filelock import FileLock

from mae_vit.core.errors import InputError
from mae_vit.core.files import nearest_existing, to_json, write_atomically, write_json
from mae_vit.core.messages import error_reason
from mae_vit.training.outputs.run_lock import lock_run

Status = Literal["running", "interrupted", "done", "failed"]
# A comparison names its runs by their identity in this variable; `summary.json` records it as `run_id`.
RUN_ID = "MAE_VIT_RUN_ID"


class RunFolder:
    """Paths and files of one run; only rank 0 writes."""

    def __init__(self, path: Path) -> None:
        """Names the folder; nothing is created yet."""
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.tensorboard = path / "tensorboard"
        self.pictures = path / "pictures"
        self.metrics = path / "metrics.jsonl"
        self.quarantine = path / "quarantine.jsonl"
        self.trackers = path / "trackers.json"
        self.encoder = path / "encoder.safetensors"
        self.summary = path / "summary.json"
        self.plan = path / "plan.txt"
        self._lock: FileLock | None = None

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *error: object) -> None:
        self.unlock()

    def check_writable(self) -> None:
        """Makes sure that the folder can be made and written, leaving nothing behind.

        Raises:
            InputError: naming the folder.
        """
        place = nearest_existing(self.path)
        if not place.is_dir():
            raise InputError(f"run folder {self.path}: {place} is not a folder")
        probe = place / f".writable.{os.getpid()}"
        try:
            probe.touch()
            probe.unlink(missing_ok=True)
        except OSError as error:
            reason = error_reason(error)
            raise InputError(f"run folder {self.path} cannot be written: {place}: {reason}") from None

    def lock(self) -> None:
        """Takes the folder, which is made if need be, for this process; until `unlock`, or its end.

        Raises:
            InputError: if another process keeps it, or if it cannot be written.
        """
        self._lock = self._lock or lock_run(self.path)

    def unlock(self) -> None:
        """Gives the folder free; once more does no harm."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def create(self, config_yaml: str, environment: dict[str, Any], plan: str = "") -> None:
        """Makes the folder and describes the run in it; `plan`: what `--dry-run` prints, for `plan.txt`."""
        self.path.mkdir(parents=True, exist_ok=True)
        write_atomically(self.path / "config.yaml", config_yaml.encode())
        write_json(self.path / "environment.json", environment)
        if plan:
            write_atomically(self.plan, (plan + "\n").encode())

    def read_summary(self) -> dict[str, Any]:
        """Returns `summary.json`; empty where there is none."""
        try:
            summary = json.loads(self.summary.read_text())
        except (OSError, ValueError):
            return {}
        return summary if isinstance(summary, dict) else {}

    def read_status(self) -> Status | None:
        """Returns the status in `summary.json`, None where there is no run."""
        status = self.read_summary().get("status")
        return status if status in ("running", "interrupted", "done", "failed") else None

    def write_summary(self, status: Status, values: dict[str, Any]) -> None:
        """Replaces `summary.json`."""
        identity = {"run_id": run_id} if (run_id := os.environ.get(RUN_ID)) else {}
        write_json(self.summary, {"status": status, **identity, **values})

    def append_metrics(self, line: dict[str, Any]) -> None:
        """Appends a line to `metrics.jsonl`."""
        with self.metrics.open("ab+") as file:
            # A line that a full disk cut short ends here.
            torn = file.tell() and (file.seek(-1, os.SEEK_END), file.read(1))[1] != b"\n"
            file.write((b"\n" if torn else b"") + (to_json(line) + "\n").encode())

    def cut_metrics(self, step: int) -> dict[str, Any] | None:
        """Drops lines after `step` (and a torn last one), so that no step is written twice.

        Returns:
            The last line kept.
        """
        if not self.metrics.exists():
            return None
        last, end, read = None, 0, 0
        # In place: a full disk must not keep a run from going back.
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
