"""The tests that need a GPU (`pytest -m gpu`), a line each as soon as it has ended."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu.jobs import Emit, Job
from benchmarks.gpu.lines import ROOT
from mae_vit.core.errors import InputError

_PYTEST = (sys.executable, "-u", "-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider")
_OUTCOME = re.compile(r"^(tests/\S+::\S+) (PASSED|FAILED|SKIPPED|ERROR)\b")
_PASSED = ("PASSED", "SKIPPED")
# Files are chosen by what they say: to collect all tests takes half a minute, and what they import.
_MARK = "mark.gpu"


def jobs(*, tiny: bool, scratch: Path) -> list[Job]:
    """One process for all."""
    return [Job("pytest -m gpu", tuple(find_tests()), _Tests(), limit_s=470)]


def find_tests() -> list[str]:
    """Names of the tests, as pytest takes them.

    Raises:
        InputError: if they cannot be collected.
    """
    files = sorted(path for path in ROOT.glob("tests/**/test_*.py") if _MARK in path.read_text())
    done = _pytest(["--collect-only", "-q", *(path.relative_to(ROOT).as_posix() for path in files)])
    tests = [line for line in done.stdout.splitlines() if re.match(r"tests/\S+::\S", line)]
    if done.returncode or not tests:
        output = (done.stdout + done.stderr).strip().splitlines()
        raise InputError(
            f"the tests of GPUs cannot be collected: {output[-1] if output else 'pytest says nothing'}"
        )
    return tests


def _pytest(arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*_PYTEST, *arguments], cwd=ROOT, capture_output=True, text=True)


@dataclass(frozen=True)
class _Tests:
    def __call__(self, wanted: frozenset[str], emit: Emit) -> None:
        options = ["-vv", "-rN", "--no-header", "--tb=short", "--timeout=240"]
        process = subprocess.Popen(
            [*_PYTEST, *options, *sorted(wanted)], cwd=ROOT, stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", file=sys.stderr)
            if matched := _OUTCOME.match(line):
                emit(matched[1], {"outcome": matched[2].lower(), "met": matched[2] in _PASSED})
        process.wait()
