"""Reads what a pretraining run has left in its folder; any of its files may be missing or torn."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mae_vit.config.load import read_run_config
from mae_vit.core.errors import InputError
from mae_vit.core.files import read_json_lines
from mae_vit.core.messages import closest_path, error_reason
from mae_vit.core.urls import redact_url
from mae_vit.models.sizes import SIZES
from mae_vit.training.outputs.run_folder import RunFolder


@dataclass(frozen=True)
class RunRecord:
    """A run as its files describe it.

    Attributes:
        path: the run folder.
        config: the resolved config, URLs without credentials; empty where it cannot be read.
        environment: versions and hardware; empty where it cannot be read.
        summary: the last `summary.json`; empty where it cannot be read.
        lines: of `metrics.jsonl`, in the order of their steps.
        damaged: lines of `quarantine.jsonl`.
        incidents: the rollback reports, in the order of their steps.
        pictures: paths of PNG files, in the order of their steps.
        plan: text of `plan.txt`; empty where there is none.
        problems: what cannot be read, a line each.
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

    @property
    def name(self) -> str:
        """The run's name; that of its folder where the config cannot be read."""
        name = self.section("run").get("name")
        return str(name) if name else self.path.resolve().name

    @property
    def status(self) -> str | None:
        """One of running, interrupted, done, failed; None where `summary.json` does not say."""
        status = self.summary.get("status")
        return status if status in ("running", "interrupted", "done", "failed") else None

    @property
    def step(self) -> int:
        """Steps done, as far as the files say."""
        last = self.lines[-1]["step"] if self.lines else 0
        steps = self.summary.get("steps")
        return max(last, steps) if isinstance(steps, int) else last

    @property
    def total_steps(self) -> int | None:
        """Steps of the whole run; None where `summary.json` does not say."""
        total = self.summary.get("total_steps")
        return total if isinstance(total, int) else None

    def section(self, name: str) -> Mapping[str, Any]:
        """A section of the config; empty without one."""
        section = self.config.get(name)
        return section if isinstance(section, dict) else {}


def read_run(path: Path) -> RunRecord:
    """Reads a run folder, at any moment of a run.

    Raises:
        InputError: if it is no folder of a pretraining run.
    """
    folder, problems = RunFolder(path), list[str]()
    if not path.is_dir():
        hint = closest_path(path)
        raise InputError(f"{path} is no run folder" + (f": {hint}" if hint else ""))
    _check_kind(path)
    config: dict[str, Any] = {}
    try:
        config = read_run_config(path)
    except InputError as error:
        problems.append(str(error).replace(f"{path} is no run folder: it has no", "there is no"))
    if isinstance(config.get("finetune"), dict):
        raise InputError(_elsewhere(folder, config))
    lines = [line for line in _lines(folder.metrics, problems) if isinstance(line.get("step"), int)]
    incidents = [
        incident
        for file in sorted((path / "incidents").glob("step-*.json"))
        if (incident := _mapping(file, problems))
    ]
    return RunRecord(
        path,
        config=redacted(config),
        environment=redacted(_mapping(path / "environment.json", problems)),
        summary=_mapping(folder.summary, problems),
        lines=tuple(sorted(lines, key=lambda line: line["step"])),
        damaged=tuple(_lines(folder.quarantine, problems, needed=False)),
        incidents=tuple(incidents),
        pictures=tuple(sorted(folder.pictures.glob("step-*.png"))),
        plan=folder.plan.read_text("utf-8", "replace") if folder.plan.is_file() else "",
        problems=tuple(problems),
    )


def _check_kind(path: Path) -> None:
    """Checks that a folder holds a run of pretraining, and nothing else that people may give."""
    if any((path / name).exists() for name in ("config.yaml", "metrics.jsonl", "summary.json")):
        return
    if (path / "results.csv").exists():
        raise InputError(f"{path} is a comparison, which has its own page: {path / 'report.html'}")
    runs = sorted(config.parent.name for config in path.glob("*/config.yaml"))
    hint = f"; runs in it: {', '.join(runs[:5])}" if runs else ""
    raise InputError(
        f"{path} is no run folder: it has none of config.yaml, metrics.jsonl, summary.json{hint}"
    )


def _elsewhere(folder: RunFolder, config: Mapping[str, Any]) -> str:
    """Says where a run of fine-tuning shows what this page shows of pretraining."""
    path, results = folder.path, folder.path / "results.json"
    places = [f"results: {results if results.exists() else folder.summary}"]
    if folder.tensorboard.exists():
        places.append(f"curves: tensorboard --logdir {path}")
    model = config.get("model")
    if isinstance(model, dict) and model.get("name") in SIZES and (path / "model.safetensors").exists():
        places.append(f"pictures: mae-vit inspect {path}")
    # A cell lies in COMPARISON/cells/ENTRY.
    comparison = path.resolve().parents[2:3]
    if comparison and (comparison[0] / "results.csv").exists():
        places.append(f"its comparison: {comparison[0] / 'report.html'}")
    return f"{path} is a run of fine-tuning, and this page is for pretraining ({'; '.join(places)})"


def _mapping(path: Path, problems: list[str]) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        problems.append(f"there is no {path.name}")
        return {}
    except (OSError, ValueError) as error:
        problems.append(f"{path.name} cannot be read: {error_reason(error)}")
        return {}
    if not isinstance(content, dict):
        problems.append(f"{path.name} cannot be read: it is no mapping")
        return {}
    return content


def _lines(path: Path, problems: list[str], *, needed: bool = True) -> list[dict[str, Any]]:
    try:
        lines = read_json_lines(path)
    except FileNotFoundError:
        if needed:
            problems.append(f"there is no {path.name}")
        return []
    except OSError as error:
        problems.append(f"{path.name} cannot be read: {error_reason(error)}")
        return []
    return [line for line in lines if isinstance(line, dict)]


def redacted(value: Any) -> Any:
    """Returns plain data with every URL, alone or behind `key=`, without credentials: pages are passed on."""
    if isinstance(value, dict):
        return {key: redacted(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [redacted(inner) for inner in value]
    if isinstance(value, str):
        key, equals, url = value.partition("=")
        # The "=" of a URL's query is no key's.
        return f"{key}={redact_url(url)}" if equals and "://" not in key else redact_url(value)
    return value


def command_of(record: RunRecord) -> str:
    """The command line of the run's last start; empty where it is not known."""
    command = record.environment.get("command")
    return shlex.join(map(str, command)) if isinstance(command, list) else ""
