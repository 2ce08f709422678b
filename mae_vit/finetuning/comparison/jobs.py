"""One run of another command: its inputs, its state, its process."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock

from mae_vit.core.errors import InputError
from mae_vit.core.files import write_json
from mae_vit.core.messages import error_reason
from mae_vit.finetuning.comparison.inputs import (
    WEIGHTS_OPTIONS,
    changed_settings,
    describe_inputs,
    difference,
)
from mae_vit.runtime.locks import try_lock
from mae_vit.training.outputs.run_folder import RunFolder

# By its path: of several checkouts a comparison's runs are those of the one that it runs in.
_COMMAND = Path(__file__).resolve().parents[2] / "cli" / "__main__.py"
_WHAT = {
    "settings": "set of options",
    "config": "content of its config file",
    "start": "start (its weights are others)",
    "data": "content of its data folder",
    **{option: f"{option} (its weights are others)" for option in WEIGHTS_OPTIONS},
}


def program_of(job: str) -> tuple[str, ...]:
    """Returns the program that runs `pretrain` or `finetune`."""
    return str(_COMMAND), job


@dataclass(frozen=True)
class Job:
    """One run.

    Attributes:
        name: for messages.
        folder: of the run.
        program: the script that runs it, and its first words (`program_of`).
        config: its file.
        arguments: of its command line, without config and folder.
        data: path of its shards.
        start: its initial weights, also among the arguments.
        notes: beside which its output and arguments are kept; beside the folder by default.
            A run whose folder is elsewhere may have been begun by others: it is always
            called, and says itself that it is finished, or another one.
    """

    name: str
    folder: Path
    program: tuple[str, ...]
    config: Path
    arguments: tuple[str, ...]
    data: str
    start: str | None = None
    notes: Path | None = None

    @property
    def summary(self) -> dict[str, Any]:
        """Returns the run's output so far; empty before it begins."""
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
        told, now = json.loads(self._told.read_text()), self._inputs()
        if what := difference(told, now):
            which = changed_settings(told, now) if what == "settings" else ""
            raise InputError(
                f"{self.folder} was run with another {_WHAT[what]} than {self.name} has now{which}: give the "
                f"comparison another run.name, or delete {self.folder} to run it again"
            )
        return RunFolder(self.folder).read_status() == "done"

    def claim(self) -> FileLock | None:
        """Takes it for this process; None if another one that shares the comparison has it.

        Raises:
            InputError: if its folder cannot be written.
        """
        path = self._beside(".lock")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            return try_lock(path)
        except OSError as error:
            reason = error_reason(error)
            raise InputError(f"{path.parent} cannot be written: {reason}") from None

    def remember(self) -> None:
        """Records its inputs before it begins."""
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
            *self.program,
            "--config",
            str(self.config),
            *self.arguments,
            f"run.dir={self.folder}",
            "run.name=" + self.folder.name,
        ]

    def work(self) -> tuple[float, float] | None:
        """Returns FLOPs done and in total; None before the run reports them."""
        told = self.summary
        total, flops = told.get("total_steps"), told.get("flops_per_step")
        if told.get("status") == "done" and not total:
            # Scoring costs almost nothing, but a progress bar over such jobs must move.
            return 1.0, 1.0
        if not total or not flops:
            return None
        if told["status"] == "done":
            return total * flops, total * flops
        return _last_step(self.folder / "metrics.jsonl") * flops, total * flops


def unfinished(jobs: Iterable[Job]) -> list[Job]:
    """Returns those that are not done.

    Raises:
        InputError: if folders hold runs of something else; it names them all.
    """
    waiting, refused = [], []
    for job in jobs:
        try:
            if not job.is_done():
                waiting.append(job)
        except InputError as error:
            refused.append((str(error), job.folder))
    if refused:
        (reason, _), *more = refused
        # Of one cause, mostly: a longer grid that chose another setting, say.
        others = f"; the same holds of {', '.join(str(folder) for _, folder in more)}" if more else ""
        raise InputError(reason + others)
    return waiting


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
