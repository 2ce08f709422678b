"""A job is one run of another command: its inputs, its state, its command line."""

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
    other_pretraining,
)
from mae_vit.finetuning.config.schema import FROZEN
from mae_vit.runtime.locks import try_lock
from mae_vit.training.checkpoints.resume import set_aside
from mae_vit.training.outputs.run_folder import RunFolder

# By its path: of several checkouts a comparison's runs are those of the one that it runs in.
_COMMAND = Path(__file__).resolve().parents[2] / "cli" / "__main__.py"
_WHAT = {
    "settings": "set of options",
    "config": "content of its config file",
    "start": "start (its weights have changed)",
    "data": "content of its data folder",
    **{option: f"{option} (its weights have changed)" for option in WEIGHTS_OPTIONS},
}


def program_of(job: str) -> tuple[str, ...]:
    """Returns the program that runs `pretrain` or `finetune`."""
    return str(_COMMAND), job


@dataclass(frozen=True)
class Job:
    """One run.

    Attributes:
        name: its name in messages.
        folder: its run folder.
        program: the script that runs it, and its first words (`program_of`).
        config: its config file.
        arguments: arguments of its command line, without config and folder.
        data: path or URL of its shards.
        start: its pretrained weights, which are also among the arguments.
        notes: the path beside which its log and inputs are stored; None for the run folder. It is set
            if the run folder is outside the comparison's. Others may have started such a run, so the
            command is always called and decides itself whether the run is finished.
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
        """The run's `summary.json` so far; empty before the run begins."""
        try:
            summary: dict[str, Any] = json.loads((self.folder / "summary.json").read_text())
        except (OSError, ValueError):
            return {}
        return summary

    @property
    def log(self) -> Path:
        """The file that receives its output."""
        return self._beside(".log")

    @property
    def _record(self) -> Path:
        return self._beside(".job.json")

    def is_done(self) -> bool:
        """Returns whether the run has finished successfully.

        Raises:
            InputError: if the folder holds a finished run of other inputs.
        """
        if self.notes is not None:
            self._check_elsewhere()
            return False
        recorded, now = self._recorded(), self._inputs()
        if recorded is None or RunFolder(self.folder).read_status() != "done":
            return False
        if what := difference(recorded, now):
            which = changed_settings(recorded, now) if what == "settings" else ""
            raise InputError(
                f"{self.folder} was run with another {_WHAT[what]} than {self.name} has now{which}: give the "
                f"comparison another run.name, or delete {self.folder} to run it again"
            )
        return True

    def _recorded(self) -> Any:
        """Returns the inputs of the run in the folder; None if there is none."""
        try:
            return json.loads(self._record.read_text())
        except FileNotFoundError:
            return None

    def _check_elsewhere(self) -> None:
        """Checks that a folder outside the comparison's holds this pretraining run, or none yet.

        Raises:
            InputError: with the keys that differ.
        """
        if differing := other_pretraining(self.folder, self.config, self.arguments):
            key = f"{self.name.replace(' ', '.', 1)}.dir"  # of "pretrain NAME"
            raise InputError(
                f"{self.folder} holds another run than {self.name} is now: {differing}: delete {self.folder} to "
                f'pretrain again, or give another folder ("{key}=..."; null takes one in the comparison\'s)'
            )

    def claim(self) -> FileLock | None:
        """Locks the job for this process; returns None if another process of the comparison runs it.

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

    def begin(self) -> None:
        """Records its inputs; call it before the run begins. An unfinished run of other inputs is set aside."""
        recorded, now = self._recorded(), self._inputs()
        if self.notes is None and recorded is not None and difference(recorded, now):
            set_aside(RunFolder(self.folder))
        write_json(self._record, now)

    def _inputs(self) -> dict[str, Any]:
        return describe_inputs(self.arguments, self.config, self.start, self.data)

    def _beside(self, suffix: str) -> Path:
        stem = self.notes or self.folder
        return stem.with_name(stem.name + suffix)

    def command(self) -> list[str]:
        """Returns the command line."""
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
        """Returns FLOPs done and in total, as the run reports them; None before it does."""
        summary = self.summary
        steps, flops = summary.get("total_steps"), summary.get("flops_per_step")
        total = steps * flops if steps and flops else summary.get("scoring_flops")
        if summary.get("status") == "done":
            return total or 0.0, total or 0.0
        if total is None:
            return None
        return (_last_step(self.folder / "metrics.jsonl") * flops if flops else 0.0), total

    @property
    def scores(self) -> bool:
        """Whether it scores frozen features, by a small part of the work of training."""
        return any(f"finetune.mode={json.dumps(mode)}" in self.arguments for mode in FROZEN)


def unfinished(jobs: Iterable[Job]) -> list[Job]:
    """Returns the jobs that are not done.

    Raises:
        InputError: if folders hold runs of other inputs; names all of them.
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
        # They mostly have one cause, for example a longer grid that chose another setting.
        others = f"; the same holds of {', '.join(str(folder) for _, folder in more)}" if more else ""
        raise InputError(reason + others)
    return waiting


def _last_step(metrics: Path) -> int:
    """Returns the step in the newest line; reads only the end of the file."""
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
