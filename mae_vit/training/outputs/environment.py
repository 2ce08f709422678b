"""What a run ran on: versions, commit, hardware."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

_PACKAGES = ("mae-vit", "torch", "torchvision", "timm", "deepspeed", "webdataset", "numpy", "safetensors")


def describe_environment(command: list[str], world_size: int) -> dict[str, Any]:
    """Collects versions, git commit and hardware."""
    gpus = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    return {
        "command": command,
        "python": platform.python_version(),
        "packages": versions_of(_PACKAGES),
        "git_commit": _git_commit(),
        "platform": platform.platform(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "gpus": gpus,
        "world_size": world_size,
        "slurm_job": os.environ.get("SLURM_JOB_ID"),
    }


def versions_of(packages: Iterable[str]) -> dict[str, str]:
    """The installed version of each package."""
    found = {}
    for name in packages:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def _git_commit() -> str | None:
    """The commit of the source tree that runs, with "+changes" if it differs; None elsewhere."""
    source = Path(__file__).resolve().parent
    try:
        ask = ["git", "-C", str(source)]
        commit = subprocess.run([*ask, "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10)
        if commit.returncode:
            return None
        changes = subprocess.run(
            [*ask, "status", "--porcelain", "-uno"], capture_output=True, text=True, timeout=10
        )
        return commit.stdout.strip() + ("+changes" if changes.stdout.strip() else "")
    except (OSError, subprocess.TimeoutExpired):
        return None


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor()
