"""Digests of whole global batches, put together from what each rank loads."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch

from mae_vit.data.batches.augmented import AugmentedSource, open_source
from mae_vit.data.batches.loader import load_batches
from mae_vit.data.images.augment import Augment
from mae_vit.data.index import ShardIndex, open_index
from mae_vit.data.order.order import Order, RankSlice
from mae_vit.data.remote.folder import DataLocation
from mae_vit.data.training_data import make_order
from mae_vit.models.masking import corrupt, patch_noise, random_masking


def open_digits(index: ShardIndex, source_name: str, img_size: int = 8) -> AugmentedSource:
    augment = Augment(
        img_size=(img_size, img_size), crop="random_resized", scale=(0.2, 1.0), ratio=(0.75, 4 / 3), flip=True
    )
    return open_source(index, source_name, channels=1, augment=augment, memory_limit_gib=1)


def open_located(data: Path | DataLocation) -> ShardIndex:
    """Opens the index of a folder here, or of what stands in for one elsewhere."""
    folder, remote = data if isinstance(data, DataLocation) else (data, None)
    return open_index(folder, "train", remote=remote)


def order_of(data: Path, mode: str, repeats: int = 1, batch: int = 96) -> Order:
    """The order "global", or "blocks" of eight lanes, over the training samples."""
    blocks = {"lanes": 8, "block_shards": 2} if mode == "blocks" else {"lanes": None, "block_shards": None}
    index = open_index(data, "train")
    return make_order(index, effective_batch_size=batch, seed=7, repeats=repeats, **blocks)


def digest_of_global_batches(
    data: Path | DataLocation,
    order: Order,
    source_name: str,
    world_size: int,
    workers: int,
    steps: range,
    accumulation=1,
) -> list[str]:
    """For each step: ids, pixel bytes, masks and corruption of the global batch, in order."""
    index = open_located(data)
    parts = []
    for rank in range(world_size):
        batches = load_batches(
            open_digits(index, source_name),
            order,
            RankSlice(rank, world_size, accumulation),
            start_step=steps.start,
            stop_step=steps.stop,
            workers=workers,
        )
        parts.append(list(batches))
        assert len(parts[-1]) == len(steps) * accumulation
    digests = []
    for number in range(len(steps)):
        micro = [p for part in parts for p in part[number * accumulation : (number + 1) * accumulation]]
        content = [torch.cat([b.keys.index for b in micro]), torch.cat([b.images for b in micro])]
        content.append(torch.cat([b.labels for b in micro]))
        content.append(torch.cat([random_masking(patch_noise(b.keys, 16), 0.75).mask for b in micro]))
        for name in ("ids", "kind", "source"):
            drawn = [getattr(corrupt(b.keys, 16, 0.5), name) for b in micro]
            content.append(torch.cat(drawn))
        assert {b.keys.epoch for b in micro} == {(steps.start + number) // order.steps_per_epoch}
        digests.append(hashlib.sha256(b"".join(t.numpy().tobytes() for t in content)).hexdigest())
    return digests
