"""Describes the environment of a run: versions, commit, hardware."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import mae_vit
from mae_vit.core.urls import redacted

_PACKAGES = ("mae-vit", "torch", "torchvision", "timm", "deepspeed", "webdataset", "numpy", "safetensors")


def describe_environment(command: list[str], world_size: int) -> dict[str, Any]:
    """Collects versions, git commit, a digest of the sources, and hardware."""
    gpus = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    return {
        "command": redacted(command),
        "python": platform.python_version(),
        "packages": versions_of(_PACKAGES),
        "git_commit": _git_commit(),
        "source_digest": _source_digest(),
        "platform": platform.platform(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "gpus": gpus,
        "world_size": world_size,
        "slurm_job": os.environ.get("SLURM_JOB_ID"),
    }


def versions_of(packages: Iterable[str]) -> dict[str, str]:
    """Returns the installed version of each package."""
    versions = {}
    for name in packages:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return versions


def _git_commit() -> str | None:
    """Returns the commit of our sources, with "+changes" if files differ; None if git does not track them."""
    here = Path(__file__).resolve()
    # Sources that were copied into another project, or installed inside it, do not belong to its commit.
    if _git(here.parent, "ls-files", "--error-unmatch", here.name) is None:
        return None
    commit, changes = (
        _git(here.parent, *words) for words in (("rev-parse", "HEAD"), ("status", "--porcelain", "-uno"))
    )
    return commit and commit + ("+changes" if changes else "")


def _git(folder: Path, *words: str) -> str | None:
    try:
        answer = subprocess.run(
            ["git", "-C", str(folder), *words], capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return None if answer.returncode else answer.stdout.strip()


def _source_digest() -> str:
    """Returns 16 digits of the SHA-256 of all modules, to distinguish copies without a commit."""
    package = Path(mae_vit.__file__).resolve().parent
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(f"{path.relative_to(package).as_posix()}\n".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor()
