"""What tests of fine-tuning share."""

import json
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# An encoder of 8x8 grey images.
TINY = [
    "model.img_size=8",
    "model.patch_size=2",
    "model.in_chans=1",
    "model.embed_dim=16",
    "model.depth=2",
    "model.num_heads=2",
]
SMALL = [
    "data.augment.flip=false",
    "train.effective_batch_size=64",
    "train.steps=6",
    "train.warmup_steps=1",
    "optim.lr=3e-3",
    "monitor.log_every_steps=1",
    "monitor.evaluate_every_steps=2",
    "monitor.tensorboard=false",
    "checkpoint.every_steps=2",
    "checkpoint.keep_last=9",
]


def summary_of(folder: Path) -> dict:
    return json.loads((folder / "summary.json").read_text())


def lines_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
