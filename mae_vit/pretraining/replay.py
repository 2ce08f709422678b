"""Rebuilds the images, crops and masks of any step of a pretraining run, as a picture and a table of keys."""

from __future__ import annotations

import csv
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from PIL import Image

from mae_vit.config.load import load_config, read_run_config
from mae_vit.config.plan import make_plan
from mae_vit.core.batch import Batch
from mae_vit.core.errors import InputError
from mae_vit.core.image_rows import Picture, draw_rows, in_colors
from mae_vit.core.keyed_rng import SampleKeys
from mae_vit.data.batches.loader import load_batches
from mae_vit.data.data_path import check_recorded
from mae_vit.data.order.order import RankSlice, data_step
from mae_vit.objectives.pretrain_config import PretrainConfig
from mae_vit.pretraining.data import open_data
from mae_vit.pretraining.setup import build_objective, describe_encoder
from mae_vit.runtime.device import find_device
from mae_vit.runtime.ranks import Ranks
from mae_vit.training.checkpoints.checkpoint import load_checkpoint, newest_before
from mae_vit.training.engines.state import tensors_of

# Images in the picture.
SHOWN, _IMAGES_IN_A_ROW = 32, 16
_COLUMNS = ("place", "epoch", "sample", "shard", "key", "label")


@dataclass(frozen=True)
class Replay:
    """A step of a run on one rank.

    Attributes:
        batch: images as the objective received them.
        samples: descriptions of the samples, in the same order.
        data_step: step of the data order; differs from the run's step after skipped steps.
        pictures: rows that the objective draws, with the step's masks.
        weights_step: step of the weights that predict; None without any.
    """

    batch: Batch
    samples: list[dict[str, Any]]
    epoch: int
    data_step: int
    pictures: list[Picture]
    weights_step: int | None


@torch.no_grad()
def replay(run: Path, *, step: int | None, of_data: int | None = None, rank: int = 0) -> Replay:
    """Rebuilds a step.

    Raises:
        InputError: if folder, data, step or rank do not exist.
    """
    if "finetune" in read_run_config(run):
        raise InputError(f"{run} is a fine-tuning run; give a pretraining run")
    config = load_config(PretrainConfig, run / "config.yaml", imports_plugins=False)
    check_recorded(config.data.path, run, "run replay in the folder where it was trained")
    environment = run / "environment.json"
    ranks = Ranks(rank, json.loads(environment.read_text())["world_size"] if environment.exists() else 1)
    if not 0 <= rank < ranks.world_size:
        raise InputError(f"--rank {rank}: must be 0 to {ranks.world_size - 1}, as in the run")
    # This process takes the place of the rank.
    device = find_device(Ranks())
    data = open_data(config, Ranks(), device)
    plan = make_plan(config, num_samples=data.num_samples, world_size=ranks.world_size)
    if step is not None and not 1 <= step <= plan.total_steps:
        raise InputError(f"--step {step}: must be 1 to {plan.total_steps}, as in the run")
    checkpoints = run / "checkpoints"
    newest = newest_before(checkpoints, None, load_checkpoint)
    skipped = newest.state.course.skipped if newest else ()
    position = of_data if of_data is not None else data_step((step or 1) - 1, skipped)
    rank_slice = RankSlice(rank, ranks.world_size, plan.accumulation)
    parts = list(
        load_batches(data.source, data.order, rank_slice, start_step=position, stop_step=position + 1)
    )
    index = torch.cat([part.keys.index for part in parts])
    batch = Batch(
        torch.cat([part.images for part in parts]),
        torch.cat([part.labels for part in parts]),
        SampleKeys(parts[0].keys.seed, parts[0].keys.epoch, index),
    )
    objective = build_objective(config, describe_encoder(config, data), num_classes=data.num_classes)
    weights = newest if step is None else newest_before(checkpoints, step, load_checkpoint)
    if weights is not None:
        saved = {**weights.state.parameters, **weights.state.buffers}
        # Each once, as saved: `state_dict` lists a shared encoder several times.
        for name, tensor in tensors_of(objective).items():
            tensor.copy_(saved[name])
    pictures = objective.to(device).eval().pictures(batch.to(device))
    return Replay(
        batch=batch,
        samples=data.samples_of(position)[rank * len(index) : (rank + 1) * len(index)],
        epoch=plan.position(position)[0],
        data_step=position,
        pictures=in_colors(pictures, objective.bands, config.monitor.picture_bands),
        weights_step=weights.step if weights else None,
    )


def write_replay(record: Replay, path: Path) -> Path:
    """Writes the first images as PNG, and all samples as CSV beside it; returns the path of the CSV."""
    shown = min(SHOWN, len(record.samples))
    width = min(shown, _IMAGES_IN_A_ROW)
    rows = []
    for first in range(0, shown, width):
        for row in record.pictures:
            part = row.images[first : min(first + width, shown)]
            white = F.pad(part, (0,) * 7 + (width - len(part),), value=1.0)
            rows.append(Picture(f"{row.label}, from image {first}", white))
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(draw_rows(rows)).save(path)
    names = path.with_suffix(".csv")
    with names.open("w", newline="", encoding="utf-8", errors="backslashreplace") as file:
        writer = csv.DictWriter(file, _COLUMNS, lineterminator="\n")
        writer.writeheader()
        for place, sample in enumerate(record.samples):
            writer.writerow({"place": place, "epoch": record.epoch, **sample})
    return names
