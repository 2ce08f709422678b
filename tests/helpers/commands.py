"""Runs commands of ours as people do, and reads what they leave."""

import csv
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from mae_vit.training.checkpoints.checkpoint import list_checkpoints, step_of

ROOT = Path(__file__).resolve().parents[2]
# An MAE that trains in no time.
SMALL_MAE = [
    *("train.engine=torch", "model.embed_dim=16", "model.depth=1", "model.num_heads=2"),
    *("objective.decoder_embed_dim=16", "objective.decoder_depth=1", "objective.decoder_num_heads=2"),
]
# A short pretraining run.
SMALL_PRETRAIN = [
    *SMALL_MAE,
    "train.steps=6",
    "train.warmup_steps=1",
    "monitor.log_every_steps=1",
    "monitor.evaluate_every_steps=3",
    "monitor.evaluate_images=32",
    "monitor.tensorboard=false",
    "checkpoint.every_steps=2",
]


def run(*arguments: str, timeout: float = 500, cwd: Path = ROOT, **options) -> subprocess.CompletedProcess:
    """Runs a command of ours with this interpreter."""
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=timeout, cwd=cwd, **options
    )


def wait_until(done: Callable[[], object], every_s: float = 0.01) -> None:
    """Waits 500 s at most."""
    deadline = time.monotonic() + 500
    while not done():
        assert time.monotonic() < deadline
        time.sleep(every_s)


def one_line(capsys) -> str:
    """The one line of an error: all that was written to stderr since it was last read."""
    error = capsys.readouterr().err
    lines = error.strip().splitlines()
    assert len(lines) == 1, error
    assert lines[0].startswith("error: "), error
    return lines[0]


def summary_of(folder: Path) -> dict:
    return json.loads((folder / "summary.json").read_text())


def lines_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def csv_rows(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(path.read_text(encoding="utf-8").splitlines()))


def saved_steps(run: Path) -> list[int]:
    return [step_of(path) for path in list_checkpoints(run / "checkpoints")]


def cut_back(run: Path, step: int) -> None:
    """As after a power cut behind this step's save: metrics may be ahead of it, results are not there."""
    for path in list_checkpoints(run / "checkpoints"):
        if step_of(path) > step:
            shutil.rmtree(path)
    for name in ("encoder.safetensors", "model.safetensors", "results.json", "predictions.csv"):
        (run / name).unlink(missing_ok=True)
    (run / "summary.json").write_text(json.dumps(summary_of(run) | {"status": "running"}))
