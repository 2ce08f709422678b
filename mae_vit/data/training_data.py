"""Builds a run's training data from the config's `data` section: images, their order, and batches.

How an image reaches the loss, in the order of the code:

1. `index`: which samples of `dataset.json` are trained on, and which are held out. The job chooses a subset of them.
2. `order`: a permutation of them for each epoch, from the seed, without the steps that a rollback skips.
3. `order.RankSlice`: the rank's part of each global batch.
4. `batches.ring`: workers get slices of the rank's batches, from any step on.
5. `index`, `shards`, `remote`: the position of a sample; its bytes, from disk or cache.
6. `images.decode`: uint8 pixels (C, H, W), or raw values of bands.
7. `images.augment`: crop, resize, flip, policy, erasing, drawn from the sample's key.
8. `batches.loader`: another sample replaces one that cannot be decoded.
9. `core.batch.Batch`: images (B, C, H, W) in the ring, in the dtype of the data; labels, keys.
10. `training.trainer.Copier`: copies to the device ahead of the step; the objective normalizes there.

Small images may lie on a GPU: then `batches.on_device` stands for 5 to 10 and draws the same views.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch

from mae_vit.config.plan import Plan, fit_batch
from mae_vit.config.schema import Config
from mae_vit.core.bands import Bands
from mae_vit.core.batch import Batch
from mae_vit.core.errors import InputError
from mae_vit.core.image_rows import find_bands
from mae_vit.core.keyed_rng import MAX_INDEX
from mae_vit.core.messages import count_of
from mae_vit.core.preprocessing import Preprocessing
from mae_vit.data.batches.augmented import AugmentedSource, open_source
from mae_vit.data.batches.loader import FixedBatches, choose_workers, load_batches, start_worker_server
from mae_vit.data.batches.on_device import DeviceImages, Place, choose_place
from mae_vit.data.batches.prefetch import fetch_ahead
from mae_vit.data.data_path import resolve_data_path
from mae_vit.data.images.augment import Interpolation
from mae_vit.data.index import ShardIndex, open_training_index, open_whole_index
from mae_vit.data.order.order import (
    BlockOrder,
    GlobalOrder,
    Order,
    RankSlice,
    RepeatedOrder,
    Skipped,
    micro_batches,
)
from mae_vit.data.views import check_pad, make_augment, normalization
from mae_vit.runtime.ranks import Ranks

# A core decodes some 500 JPEGs of ImageNet's size a second; a GPU trains ViT-B on thousands.
_FEW_CORES = 4


def make_order(
    index: ShardIndex,
    samples: np.ndarray | None = None,
    *,
    effective_batch_size: int,
    seed: int,
    lanes: int | None,
    block_shards: int | None,
    repeats: int = 1,
) -> Order:
    """Builds the order of a split's samples; of sorted `samples` alone, it yields indices into them.

    `lanes` and `block_shards` are those of the order "blocks"; None for "global".

    Raises:
        InputError: if there are more than 2**32 views.
    """
    total, images = len(index) if samples is None else len(samples), effective_batch_size // repeats
    if repeats > 1 and total * repeats > MAX_INDEX:
        raise InputError(
            f"data.repeats={repeats} of {total:,} images make more than 2**32 views (nearest: {MAX_INDEX // total})"
        )
    order: Order = GlobalOrder(total, images, seed)
    if lanes is not None and block_shards is not None:
        counts = [shard.samples for shard in index.split_info.shards]
        if samples is not None:
            # A shard without chosen samples does not count.
            shards = np.searchsorted(np.cumsum(counts), samples, side="right")
            counts = np.unique(shards, return_counts=True)[1].tolist()
        order = BlockOrder(
            counts, effective_batch_size=images, seed=seed, lanes=lanes, block_shards=block_shards
        )
    return order if repeats == 1 else RepeatedOrder(order, repeats)


@dataclass(frozen=True)
class TrainingData:
    """The training images of a run.

    Attributes:
        index: index of their split.
        samples: sorted numbers of the images in the split; None for all.
        source: reads and augments them.
        order: order of indices into `source`.
        cores: CPU cores of this rank.
        workers: data workers of this rank.
        mean: mean of each channel of pixels in 0..1; `std` likewise.
        pin_memory: whether the workers' batches are pinned, to be copied to a GPU.
        device: device of this rank.
        place: where views are computed.
    """

    index: ShardIndex
    samples: np.ndarray | None
    source: AugmentedSource
    order: Order
    cores: int
    workers: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    pin_memory: bool
    device: torch.device
    place: Place

    @cached_property
    def on_device(self) -> DeviceImages:
        """The images on the device; copies them there once."""
        return DeviceImages(self.source, self.device, seed=self.order.seed, repeats=self.order.repeats)

    @property
    def num_samples(self) -> int:
        """Number of training images."""
        return len(self.source)

    @property
    def identity(self) -> dict[str, Any]:
        """Returns the identity of the data: its shards' fingerprint, normalization and preprocessing."""
        facts = {"fingerprint": self.index.fingerprint, "mean": list(self.mean), "std": list(self.std)}
        facts |= {**self.bands.to_entry(), **self.preprocessing.to_entry()}
        return {f"data.{name}": value for name, value in facts.items()}

    @property
    def bands(self) -> Bands:
        """Meaning of the images' raw values."""
        return self.index.bands

    @property
    def preprocessing(self) -> Preprocessing:
        """Changes that `prepare` made to the images."""
        return self.index.split_info.processing.of_images

    def describe_cores(self, ranks: Ranks) -> str:
        """Formats the plan's line on cores and data workers."""
        workers = count_of(self.workers, "worker")
        return f"{self.cores}, {workers} for each of {count_of(ranks.world_size, 'rank')}"

    def core_warnings(self) -> list[str]:
        """Warns if the cores are so few that a GPU will wait for images."""
        # Batches are pinned for GPUs only.
        if not self.pin_memory or self.source.in_memory or self.cores >= _FEW_CORES:
            return []
        return [
            f"{count_of(self.cores, 'core')} for each GPU, which will wait for decoding; give each rank "
            f"{_FEW_CORES} or more (sbatch --cpus-per-task)"
        ]

    def batches(self, ranks: Ranks, plan: Plan, start_step: int, skipped: Skipped) -> Iterator[Batch]:
        """Yields this rank's micro-batches from `start_step` to the end of the run."""
        rank_slice = RankSlice(ranks.rank, ranks.world_size, plan.accumulation)
        steps: dict[str, Any] = {"start_step": start_step, "stop_step": plan.total_steps, "skipped": skipped}
        positions = micro_batches(self.order, rank_slice, **steps)
        if self.place.on_device:
            images = self.on_device  # the copy to the device is no part of the first step
            return (images.batch(epoch, places) for epoch, places in positions)
        batches = load_batches(
            self.source, self.order, rank_slice, **steps, workers=self.workers, pin_memory=self.pin_memory
        )
        if self.index.remote is None or not self.source.reads_shards:
            return batches
        coming = (self.source.numbers(places) for _, places in positions)
        return fetch_ahead(batches, self.index, coming, node_ranks=ranks.local_world_size)

    def read_some(self, first: int, images: int) -> Batch:
        """Reads a micro-batch in this process, for timing: images from index `first` on, wrapping around."""
        places = np.arange(first, first + images) // self.order.repeats % self.num_samples
        if self.place.on_device:
            return self.on_device.batch(0, places)
        seed = self.order.seed
        return next(iter(FixedBatches(self.source, places, seed=seed, batch_size=images, replace=True)))

    def samples_of(self, data_step: int) -> list[dict[str, Any]]:
        """Lists the samples of a data step over all ranks: number in the split, shard, key and label of each."""
        epoch, step = divmod(data_step, self.order.steps_per_epoch)
        size = self.order.effective_batch_size
        samples = self.order.samples(epoch, step * size, (step + 1) * size)
        if self.samples is not None:
            samples = self.samples[samples]
        return [
            {
                "sample": int(n),
                "shard": self.index.shard_of(n),
                "key": self.index.find_key(n),
                "label": int(self.index.labels[n]),
            }
            for n in samples
        ]


def open_training_split(config: Config, ranks: Ranks, *, whole: bool = False) -> ShardIndex:
    """Opens the training split, and makes the checks that read no keys: those of remote data are in all shards.

    A `whole` split may not lack samples, which others would replace; its images are seen as they are.

    Raises:
        InputError: if the data are missing or damaged, or if options do not suit the images.
    """
    section, bands = config.data, config.monitor.picture_bands
    folder, remote = resolve_data_path(
        section.path, cache_dir=section.cache_dir, cache_gib=section.cache_gib, say=ranks.local_rank == 0
    )
    if whole:
        index = open_whole_index(folder, section.split, remote=remote)
    else:
        budget, say = section.damage_budget, ranks.rank == 0
        index = open_training_index(folder, section.split, damage_budget=budget, say=say, remote=remote)
        check_pad(section.augment.crop, index, config.model.image_hw)
    if bands is not None:
        find_bands(bands, index.dataset.bands, config.model.channels)
    return index


def open_training_data(
    config: Config,
    index: ShardIndex,
    samples: np.ndarray | None,
    ranks: Ranks,
    device: torch.device,
    *,
    interpolation: Interpolation = "bicubic",
    masks: bool = False,
) -> TrainingData:
    """Opens the images of a split, or the sorted subset `samples`, and chooses source, order and workers.

    Raises:
        InputError: for settings that do not fit the images.
    """
    section, img_size = config.data, config.model.image_hw
    mean, std = normalization(section.normalize, index.dataset, config.model.channels)
    views = make_augment(section.augment, img_size, mean, interpolation)
    source = open_source(
        index,
        section.source,
        channels=config.model.channels,
        augment=views,
        memory_limit_gib=section.memory_limit_gib,
        masks=masks,
    )
    cores, on_gpu = ranks.cores, device.type == "cuda"
    source = replace(source, samples=samples)
    place = choose_place(section.augment.device, source, workers=section.workers, device=device)
    workers = 0
    if not place.on_device:
        workers = choose_workers(section.workers, source, cores=cores, on_gpu=on_gpu)
    if workers:
        start_worker_server(policies=views.policy is not None, gpu_cores=cores if on_gpu else None)
    order = make_order(
        index,
        samples,
        effective_batch_size=fit_batch(config, num_samples=len(index) if samples is None else len(samples)),
        seed=config.run.seed,
        lanes=section.lanes,
        block_shards=section.block_shards,
        repeats=section.repeats,
    )
    return TrainingData(
        index=index,
        samples=samples,
        source=source,
        order=order,
        cores=cores,
        workers=workers,
        mean=mean,
        std=std,
        pin_memory=on_gpu,
        device=device,
        place=place,
    )
