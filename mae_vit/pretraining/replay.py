"""Rebuilds the images, crops and masks of any step of a pretraining run: what it saw, as a picture with keys."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from mae_vit.config.load import load_config, read_run_config
from mae_vit.config.plan import Plan, make_plan
from mae_vit.core.batch import Batch
from mae_vit.core.composites import in_colors
from mae_vit.core.errors import InputError
from mae_vit.core.image_rows import Picture, draw_rows
from mae_vit.core.keyed_rng import SampleKeys
from mae_vit.data.batches.loader import load_batches
from mae_vit.data.order.order import RankSlice
from mae_vit.data.order.skipped_steps import data_step
from mae_vit.objectives.objective import Objective
from mae_vit.objectives.pretrain_config import PretrainConfig
from mae_vit.pretraining.data import Data, open_data
from mae_vit.pretraining.setup import build_objective, count_classes, describe_encoder
from mae_vit.runtime.device import find_device
from mae_vit.runtime.ranks import Ranks
from mae_vit.training.checkpoints.checkpoint import Checkpoint, load_checkpoint
from mae_vit.training.checkpoints.format import BrokenCheckpoint, list_checkpoints, step_of

_IMAGES_IN_A_ROW = 16
_COLUMNS = ("place", "epoch", "sample", "shard", "key", "label")


@dataclass(frozen=True)
class Replay:
    """One step of a run, of one rank.

    Attributes:
        batch: its images as the objective took them.
        samples: their names, in the same order.
        epoch: of the data order.
        data_step: of the data order, which differs from the run's once steps were left out.
        pictures: the objective's, of the images with the step's masks.
        weights_step: of the weights that predictions are made by; None without any.
    """

    batch: Batch
    samples: list[dict[str, Any]]
    epoch: int
    data_step: int
    pictures: list[Picture]
    weights_step: int | None


def replay(run: Path, *, step: int | None, of_data: int | None = None, rank: int = 0) -> Replay:
    """Rebuilds a step.

    Args:
        run: its folder.
        step: from 1, as metrics have it.
        of_data: the step of the data order instead, from 0, as incident reports have it.
        rank: of the run.

    Raises:
        InputError: if folder, data or step are not there.
    """
    config = load_config(PretrainConfig, _config_of(run), [])
    ranks = Ranks(rank, _world_size(run))
    if not 0 <= rank < ranks.world_size:
        raise InputError(f"--rank {rank}: the run has ranks 0 to {ranks.world_size - 1}")
    # Of this process, which stands in for a rank.
    device = find_device(Ranks())
    data = open_data(config, Ranks(), device)
    plan = make_plan(config, num_samples=data.num_samples, world_size=ranks.world_size)
    if step is not None and not 1 <= step <= plan.total_steps:
        raise InputError(f"--step {step}: the run has steps 1 to {plan.total_steps}")
    newest = _newest(run)
    skipped = newest.state.course.skipped if newest else ()
    place = of_data if of_data is not None else data_step((step or 1) - 1, skipped)
    batch = _batch_of(data, plan, ranks, place)
    classes = count_classes(config, data)
    objective = build_objective(config, describe_encoder(config, data), num_classes=classes)
    weights = _newest(run, before=step) if step is not None else newest
    if weights is not None:
        objective.load_state_dict({**weights.state.parameters, **weights.state.buffers}, strict=True)
    per_rank = plan.effective_batch_size // ranks.world_size
    return Replay(
        batch=batch,
        samples=data.samples_of(place)[rank * per_rank : (rank + 1) * per_rank],
        epoch=plan.position(place)[0],
        data_step=place,
        pictures=_pictures(objective.to(device), batch.to(device), config.monitor.picture_bands),
        weights_step=weights.step if weights else None,
    )


def write_replay(record: Replay, path: Path, *, images: int) -> tuple[Path, Path]:
    """Writes the first images as PNG, and the names of all as CSV beside it; returns both paths."""
    shown = min(images, len(record.samples))
    width = min(shown, _IMAGES_IN_A_ROW)
    rows = [
        _filled(
            Picture(f"{row.label}, from image {start}", row.images[start : min(start + width, shown)]), width
        )
        for start in range(0, shown, width)
        for row in record.pictures
    ]
    picture = draw_rows(rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(picture).save(path)
    names = path.with_suffix(".csv")
    with names.open("w", newline="", encoding="utf-8", errors="backslashreplace") as file:
        writer = csv.DictWriter(file, _COLUMNS, lineterminator="\n")
        writer.writeheader()
        for place, sample in enumerate(record.samples):
            writer.writerow({"place": place, "epoch": record.epoch, **sample})
    return path, names


def _batch_of(data: Data, plan: Plan, ranks: Ranks, place: int) -> Batch:
    """All micro-batches of a step, as one."""
    share = RankSlice(ranks.rank, ranks.world_size, plan.accumulation)
    parts = list(load_batches(data.source, data.order, share, start_step=place, stop_step=place + 1))
    keys = parts[0].keys
    return Batch(
        torch.cat([part.images for part in parts]),
        torch.cat([part.labels for part in parts]),
        SampleKeys(keys.seed, keys.epoch, torch.cat([part.keys.index for part in parts])),
    )


@torch.no_grad()
def _pictures(objective: Objective, batch: Batch, picture_bands: Sequence[int | str] | None) -> list[Picture]:
    objective.eval()
    return in_colors(objective.pictures(batch), objective.bands, picture_bands)


def _filled(row: Picture, count: int) -> Picture:
    """A row of `count` images, the missing ones white."""
    images: Tensor = row.images
    missing = images.new_ones(count - len(images), *images.shape[1:])
    return Picture(row.label, torch.cat([images, missing]))


def _config_of(run: Path) -> Path:
    if "finetune" in read_run_config(run):
        raise InputError(f"{run} is a fine-tuning run: only pretraining is replayed")
    return run / "config.yaml"


def _world_size(run: Path) -> int:
    try:
        return int(json.loads((run / "environment.json").read_text())["world_size"])
    except (OSError, ValueError, KeyError, TypeError):
        return 1


def _newest(run: Path, *, before: int | None = None) -> Checkpoint | None:
    """The newest whole checkpoint; of those from before a step, where one is named."""
    for path in reversed(list_checkpoints(run / "checkpoints")):
        if before is None or step_of(path) < before:
            try:
                return load_checkpoint(path)
            except BrokenCheckpoint:
                continue
    return None
