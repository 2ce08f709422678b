"""Restarts by Slurm, which runs the same command again and counts restarts in SLURM_RESTART_COUNT."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from mae_vit.core.files import read_json, write_atomically
from mae_vit.core.messages import error_reason


def mark_slurm_progress() -> None:
    """Records which restart saved something: slurm/common.sh gives up after several that saved nothing."""
    path = os.environ.get("MAE_VIT_SAVED")
    if path is None:
        return
    try:
        write_atomically(Path(path), f"{_restart()}\n".encode())
    except OSError as error:
        # The run continues: at worst its job is not restarted.
        reason = error_reason(error)
        print(f"warning: {path}: {reason}; this restart counts as one that saved nothing", file=sys.stderr)


def is_requeued_run(run: Path) -> bool:
    """Returns whether an earlier start of this job created the run folder: `--resume never` then resumes it."""
    if not _restart():
        return False
    try:
        first_job = read_json(run / "environment.json")["slurm_job"]
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return first_job is not None and first_job == os.environ.get("SLURM_JOB_ID")


def _restart() -> int:
    return int(os.environ.get("SLURM_RESTART_COUNT", "0"))
