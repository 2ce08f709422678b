"""What every benchmark's report says beside its numbers, and where it goes."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.machine import describe_machine
from mae_vit.training.outputs.environment import describe_environment

ROOT = Path(__file__).resolve().parents[2]
# Files that decide what is measured. Results are none: one benchmark's result makes no other one dirty.
SOURCES = ("mae_vit", "benchmarks", "configs", "pretrain", "finetune", "pyproject.toml")


def add_out(parser: argparse.ArgumentParser) -> None:
    """Adds the option that keeps a report."""
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the JSON here too")


def measured_on(*, threads: int, world_size: int = 1) -> dict[str, Any]:
    """The environment of a measurement: command, commit, versions, processor, threads, load.

    It holds no path and no name of the machine.

    Args:
        threads: torch's, in each process that is measured.
        world_size: ranks of a run.
    """
    script = Path(sys.argv[0]).resolve()
    name = str(script.relative_to(ROOT)) if script.is_relative_to(ROOT) else script.name
    described = describe_environment([name, *map(without_folder, sys.argv[1:])], world_size)
    commit = described["git_commit"]
    for hidden in ("platform", "processor", "cores", "slurm_job"):
        del described[hidden]
    return {
        **described,
        "git_commit": commit and commit.removesuffix("+changes"),
        "dirty": is_dirty(ROOT),
        **describe_machine(threads),
    }


def without_folder(word: str) -> str:
    """A word of a command whose absolute path, if it is one, is cut to its last name."""
    key, equals, value = word.rpartition("=")
    return f"{key}{equals}{Path(value).name}" if value.startswith("/") else word


def is_dirty(root: Path) -> bool | None:
    """Whether sources differ from the commit, new files included; None outside a checkout."""
    command = ["git", "-C", str(root), "status", "--porcelain", "--", *SOURCES]
    try:
        status = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return None if status.returncode else bool(status.stdout.strip())


def head_of(clone: Path) -> str | None:
    """The commit that a clone of another repository stands at; None outside a checkout."""
    # The prefix is empty at the root of a checkout: a folder inside of another one has no commit of its own.
    command = ["git", "-C", str(clone), "rev-parse", "--show-prefix", "HEAD"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    prefix, _, commit = found.stdout.partition("\n")
    return None if found.returncode or prefix else commit.strip()


def publish(
    report: dict[str, Any], out: Path | None, *, threads: int | None = None, world_size: int = 1
) -> None:
    """Prints a report with the environment that it holds for, and writes it where asked.

    Args:
        report: what was measured.
        out: file.
        threads: torch's, in each process that is measured; None for those of this process.
        world_size: ranks of a run.
    """
    threads = torch.get_num_threads() if threads is None else threads
    environment = measured_on(threads=threads, world_size=world_size)
    text = json.dumps({**report, "environment": environment}, indent=2)
    print(text)
    if out is not None:
        out.write_text(text + "\n")


def write_part(out: Path, benchmark: str, part: str, result: dict[str, Any]) -> None:
    """Writes one part of a benchmark into its file; other parts stay as they are, with their environments.

    Args:
        out: file; it may have parts of other runs.
        benchmark: name.
        part: name.
        result: with the environment that it was measured in.
    """
    assert "environment" in result, part
    parts = json.loads(out.read_text())["results"] if out.exists() else {}
    report = {"benchmark": benchmark, "results": {**parts, part: result}}
    partial_file = out.with_name(f".{out.name}.partial")
    partial_file.write_text(json.dumps(report, indent=2) + "\n")
    partial_file.replace(out)
