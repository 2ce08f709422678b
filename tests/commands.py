"""Runs commands of ours as people do."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def run(*arguments: str, timeout: float = 120, **options) -> subprocess.CompletedProcess:
    """Runs a command of ours with this interpreter."""
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=timeout, cwd=ROOT, **options
    )
