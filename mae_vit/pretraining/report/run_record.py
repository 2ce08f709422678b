"""Reads the files in the folder of a run, at any moment of the run."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mae_vit.config.load import read_run_config
from mae_vit.core.errors import InputError
from mae_vit.core.files import read_json, read_json_lines
from mae_vit.core.messages import closest_path, error_reason
from mae_vit.core.urls import redacted
from mae_vit.training.outputs.run_folder import RunFolder


@dataclass(frozen=True)
class RunRecord:
    """A run as its files describe it. Values of unreadable files are empty.

    Config and environment have URLs without credentials.

    Attributes:
        summary: `summary.json`, and the accuracy by class of a fine-tuning run.
        lines: lines of `metrics.jsonl`, by step.
        damaged: lines of `quarantine.jsonl`.
        incidents: the rollback reports, by step.
        pictures: paths of PNG files, by step.
        problems: a line for each unreadable file.
        trains: whether a process trains in the folder now.
    """

    path: Path
    config: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)
    summary: Mapping[str, Any] = field(default_factory=dict)
    lines: tuple[Mapping[str, Any], ...] = ()
    damaged: tuple[Mapping[str, Any], ...] = ()
    incidents: tuple[Mapping[str, Any], ...] = ()
    pictures: tuple[Path, ...] = ()
    plan: str = ""
    problems: tuple[str, ...] = ()
    trains: bool = False

    @property
    def name(self) -> str:
        """The run's name; the folder's name if the config cannot be read."""
        return str(self.section("run").get("name") or self.path.resolve().name)

    @property
    def step(self) -> int:
        """Steps done according to metrics and summary."""
        return max(self.lines[-1]["step"] if self.lines else 0, self.summary.get("steps", 0))

    def section(self, name: str) -> Mapping[str, Any]:
        """Returns a section of the config; empty if there is none."""
        section = self.config.get(name)
        return section if isinstance(section, dict) else {}


def read_run(path: Path) -> RunRecord:
    """Reads a run folder. Missing or damaged files become `problems`.

    Raises:
        InputError: if it is not the folder of a run.
    """
    folder, problems = RunFolder(path), list[str]()
    _check_kind(path)
    config = _read(path / "config.yaml", problems, lambda file: read_run_config(file.parent))
    summary = _read(folder.summary, problems)
    if tested := isinstance(config.get("finetune"), dict) and _read(path / "results.json", []):
        summary = {**summary, "per_class": tested["per_class"]}
    incidents = (_read(file, problems) for file in sorted((path / "incidents").glob("step-*.json")))
    # Scores of frozen features leave no metrics.
    lines = _read(folder.metrics, [] if "scoring_flops" in summary else problems, read_json_lines)
    return RunRecord(
        path,
        config=redacted(config),
        environment=redacted(_read(path / "environment.json", problems)),
        summary=summary,
        lines=tuple(sorted(lines, key=lambda line: line["step"])),
        damaged=tuple(_read(folder.quarantine, [], read_json_lines)),  # most runs have none
        incidents=tuple(filter(None, incidents)),
        pictures=tuple(sorted(folder.pictures.glob("step-*.png"))),
        plan=folder.plan.read_text("utf-8", "replace") if folder.plan.is_file() else "",
        problems=tuple(problems),
        trains=bool(folder.describe_user()),
    )


def describe_score(summary: Mapping[str, Any]) -> str:
    """Words the score of a finished fine-tuning run on test images, else on validation images; empty without one."""
    for split, images in (("test", "test images"), ("val", "validation images")):
        for metric, words in (("top1", f"of {images} right"), ("miou", f"mIoU on {images}")):
            if (score := summary.get(f"{split}_{metric}")) is not None:
                return f"{score:.1%} {words}"
    return ""


def last_step(folder: Path) -> int:
    """Returns the step in the newest line of a run's metrics, 0 before the first; reads only the end of the file."""
    try:
        with RunFolder(folder).metrics.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 4096))
            steps = re.findall(rb'^\{"step": (\d+),', file.read(), re.MULTILINE)
    except OSError:
        return 0
    return int(steps[-1]) if steps else 0


def _check_kind(path: Path) -> None:
    """Raises InputError if a folder holds no run; the message names what it is, or the runs inside."""
    if any((path / name).exists() for name in ("config.yaml", "metrics.jsonl", "summary.json")):
        return
    if (path / "results.csv").exists():
        raise InputError(f"{path} is a comparison; open its own page, {path / 'report.html'}")
    runs = sorted(config.parent.name for config in path.glob("*/config.yaml"))
    hint = f"runs in it: {', '.join(runs[:5])}" if runs else "" if path.is_dir() else closest_path(path)
    what = "is not a run folder" if path.exists() else "does not exist"
    raise InputError("; ".join(filter(None, [f"{path} {what}", hint])))


def _read(path: Path, problems: list[str], read: Callable[[Path], Any] = read_json) -> Any:
    """Reads a file; if that fails, notes a problem and returns an empty mapping."""
    try:
        return read(path)
    except (OSError, ValueError) as error:
        reason = f"{path.name} cannot be read: {error_reason(error)}"
        problems.append(reason if path.exists() else f"there is no {path.name}")
    return {}
