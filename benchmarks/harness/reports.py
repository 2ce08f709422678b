"""What every benchmark's report says beside its numbers, and where it goes."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from mae_vit.training.outputs.environment import describe_environment


def add_out(parser: argparse.ArgumentParser) -> None:
    """Adds the option that keeps a report."""
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the JSON here too")


def publish(report: dict[str, Any], out: Path | None, *, world_size: int = 1) -> None:
    """Prints a report with the environment that it holds for, and writes it where asked."""
    script = f"benchmarks/{Path(sys.argv[0]).name}"
    environment = describe_environment([script, *sys.argv[1:]], world_size)
    text = json.dumps({**report, "environment": environment}, indent=2)
    print(text)
    if out is not None:
        out.write_text(text + "\n")
