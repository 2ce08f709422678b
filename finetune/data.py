"""Opens the data of a fine-tuning job: what is trained on, what chooses the epoch, what is tested on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from finetune.config import FinetuneConfig
from finetune.recipes import TEST_SPLITS
from mae_vit.batch import Batch
from mae_vit.data.augment import Augment
from mae_vit.data.feeding import check_cache, training_batches
from mae_vit.data.index import ShardIndex, open_index
from mae_vit.data.loader import FixedBatches, start_worker_server
from mae_vit.data.opening import (
    check_labels,
    check_pad,
    choose_workers,
    make_order,
    make_views,
    normalization,
    open_training_index,
)
from mae_vit.data.order import Order, Share, permute
from mae_vit.data.reading import Source, open_source
from mae_vit.data.remote.folder import locate
from mae_vit.data.step_samples import samples_of_step
from mae_vit.data.subset import SubsetSource, draw_held_out, limit_per_class
from mae_vit.errors import InputError
from mae_vit.keyed import Stream, derive_key
from mae_vit.plan import Plan
from mae_vit.skipping import Skipped
from mae_vit.training.distributed import Ranks, available_cores
from mae_vit.training.evaluate import HeldOut
from mae_vit.urls import shown

# Not the run's seed: runs of all seeds are measured on the same images.
_MEASURING_SEED = 0


@dataclass(frozen=True)
class FinetuneData:
    """The images of a run.

    Attributes:
        config: of the run.
        index: of the split that is trained on.
        train: its samples that are trained on, sorted.
        held_out: its samples that choose the epoch or the rate, sorted; none without `finetune.holdout`.
        source: of augmented training images, by their place in `train`.
        plain: of all images of the split, without augmentation.
        order: of the places in `train`.
        test_index: of the split that is tested on; nothing opens its images before the end.
        mean: per-channel mean that images are normalized by (of pixels in 0..1).
        std: per-channel standard deviation.
        workers: data processes of this rank.
        pin_memory: for copies to a GPU.
    """

    config: FinetuneConfig
    index: ShardIndex
    train: np.ndarray
    held_out: np.ndarray
    source: Source
    plain: Source
    order: Order
    test_index: ShardIndex
    mean: tuple[float, ...]
    std: tuple[float, ...]
    workers: int
    pin_memory: bool

    @property
    def classes(self) -> list[str]:
        """Names of the classes."""
        return self.index.dataset.classes

    @property
    def test(self) -> np.ndarray:
        """The samples that are tested on: all with a label."""
        return np.flatnonzero(self.test_index.labels >= 0)

    @property
    def identity(self) -> dict[str, Any]:
        """What tells this data from other data."""
        return {
            "data.fingerprint": self.index.fingerprint,
            "data.mean": list(self.mean),
            "data.std": list(self.std),
            "finetune.test_split": self.test_index.split,
            "finetune.test_fingerprint": self.test_index.fingerprint,
        }

    def batches(self, ranks: Ranks, plan: Plan, start_step: int, skipped: Skipped) -> Iterator[Batch]:
        """Yields this rank's micro-batches from `start_step` to the end of the run."""
        return training_batches(
            self.index,
            self.source,
            self.order,
            Share(ranks.rank, ranks.world_size, plan.accumulation),
            node_ranks=ranks.local_world_size,
            start_step=start_step,
            stop_step=plan.total_steps,
            skipped=skipped,
            workers=self.workers,
            pin_memory=self.pin_memory,
        )

    def samples_of(self, data_step: int) -> list[dict[str, Any]]:
        """Names the samples of a step of the data order."""
        return samples_of_step(self.index, self.order, data_step, numbers=self.train)

    def fixed(
        self, source: Source, samples: np.ndarray, ranks: Ranks, batch_size: int, *, replace: bool = False
    ) -> FixedBatches:
        """Returns this rank's part of some samples, without augmentation; with `replace`, past damaged ones."""
        return FixedBatches(
            source,
            samples[ranks.rank :: ranks.world_size],
            seed=_MEASURING_SEED,
            batch_size=batch_size,
            workers=self.workers,
            pin_memory=self.pin_memory,
            replace=replace,
        )

    def measured(self, ranks: Ranks, *, pictures: int, batch_size: int) -> HeldOut | None:
        """Returns the held-out images; None where none are held out."""
        if not len(self.held_out):
            return None
        key = derive_key(_MEASURING_SEED, Stream.ORDER, 0)
        count = len(self.held_out)
        shown = self.held_out[permute(np.arange(min(pictures, count)), count, key)]
        return HeldOut(
            self.fixed(self.plain, self.held_out, ranks, batch_size),
            next(iter(FixedBatches(self.plain, shown, seed=_MEASURING_SEED, batch_size=len(shown)))),
        )

    def some_of_train(self, count: int) -> np.ndarray:
        """Draws up to `count` training samples, sorted."""
        total = len(self.train)
        key = derive_key(_MEASURING_SEED, Stream.ORDER, 0)
        return np.sort(self.train[permute(np.arange(min(count, total)), total, key)])

    def open_test(self) -> Source:
        """Opens the images of the test split: at the end of a run, once."""
        return _open_plain(self.config, self.test_index)


def open_data(config: FinetuneConfig, ranks: Ranks, device: torch.device) -> FinetuneData:
    """Opens the splits and chooses samples, source and workers.

    Raises:
        InputError: for data that is missing, damaged or without labels, for a split that
            there is not, or settings that do not fit the images.
    """
    section, img_size = config.data, config.model.image_hw
    index = _open_train_index(config, ranks)
    test_index = _open_test_index(config, index)
    check_pad(section.augment.crop, index, img_size)
    train, held_out = _choose(config, index, ranks)
    _check_held_out(index, held_out)
    mean, std = normalization(section.normalize, index.dataset, config.model.in_chans)
    views = make_views(img_size, mean, **section.augment.view_options)
    source = open_source(
        index,
        section.source,
        channels=config.model.in_chans,
        augment=views,
        memory_limit_gib=section.memory_limit_gib,
    )
    on_gpu = device.type == "cuda"
    cores = available_cores() // ranks.local_world_size
    policies = views.policy is not None
    workers = choose_workers(section.workers, source, cores=cores, on_gpu=on_gpu, policies=policies)
    if workers:
        start_worker_server(policies=policies)
    order = make_order(
        index,
        train,
        effective_batch_size=config.train.effective_batch_size,
        seed=config.run.seed,
        lanes=section.lanes,
        block_shards=section.block_shards,
        repeats=section.repeats,
    )
    if config.finetune.mode == "finetune":
        check_cache(index, source, order, world_size=ranks.world_size, node_ranks=ranks.local_world_size)
    return FinetuneData(
        config=config,
        index=index,
        train=train,
        held_out=held_out,
        source=SubsetSource(source, train),
        plain=_open_plain(config, index),
        order=order,
        test_index=test_index,
        mean=mean,
        std=std,
        workers=workers,
        pin_memory=on_gpu,
    )


def _open_plain(config: FinetuneConfig, index: ShardIndex) -> Source:
    return open_source(
        index,
        "auto" if config.data.source == "memory" else config.data.source,
        channels=config.model.in_chans,
        augment=Augment(img_size=config.model.image_hw),
        memory_limit_gib=config.data.memory_limit_gib,
    )


def _open_train_index(config: FinetuneConfig, ranks: Ranks) -> ShardIndex:
    """Opens the split that is trained on; damaged samples are replaced in training alone, not in cached features."""
    section, say = config.data, ranks.rank == 0
    path, remote = locate(
        section.path, cache_dir=section.cache_dir, cache_gib=section.cache_gib, say=ranks.local_rank == 0
    )
    if config.finetune.mode != "finetune":
        return open_index(path, section.split, remote=remote)
    index = open_training_index(
        path, section.split, damage_budget=section.damage_budget, say=say, remote=remote
    )
    check_labels(index)
    return index


def _check_held_out(index: ShardIndex, held_out: np.ndarray) -> None:
    """Refuses held-out images that are known to be lost: now rather than at the first evaluation."""
    lost = np.intersect1d(index.lost, held_out)
    if len(lost):
        first = index.damage(int(lost[0]), index.why_lost(int(lost[0])))
        raise InputError(
            f"{len(lost)} of the {len(held_out):,} held-out images cannot be read: {first}: mend it (see "
            f"`mae-vit check {index.folder}`), or train on all (finetune.holdout=0)"
        )


def _choose(config: FinetuneConfig, index: ShardIndex, ranks: Ranks) -> tuple[np.ndarray, np.ndarray]:
    """Chooses samples: (trained on, held out). The subset is drawn first: both count as labels used."""
    labels = np.asarray(index.labels)
    samples = np.flatnonzero(labels >= 0)
    if len(np.unique(labels[samples])) < 2:
        raise InputError(
            f'split "{index.split}" of {shown(config.data.path)} has no labels of two classes: fine-tuning needs them '
            "(mae-vit prepare takes them from class folders)"
        )
    limit, share = config.data.labels_per_class, config.finetune.holdout
    if limit is None and not share:
        return samples, samples[:0]
    keys = index.keys()
    if limit is not None:
        fewest = int(np.bincount(labels[samples]).min())
        if limit > int(np.bincount(labels[samples]).max()):
            raise InputError(f"data.labels_per_class={limit} is more than any class has (fewest: {fewest})")
        samples, _ = limit_per_class(samples, labels, keys, limit)
    if config.finetune.mode in ("few_shot", "knn") or not share:
        # Nothing is chosen by held-out images: all are support.
        return samples, samples[:0]
    held_out, train = draw_held_out(samples, labels, keys, share)
    if len(held_out) < ranks.world_size:
        chosen, else_ = ("rate", "with one of finetune.lr_factors")
        if config.finetune.mode == "finetune":
            chosen, else_ = "epoch", "for the last epoch"
        raise InputError(
            f"finetune.holdout={share:g} of {len(samples)} images leaves {len(held_out)} to choose the {chosen} by: "
            f"give more labels, or finetune.holdout=0 {else_}"
        )
    return train, held_out


def _open_test_index(config: FinetuneConfig, index: ShardIndex) -> ShardIndex:
    wanted, own, splits = config.finetune.test_split, config.data.split, index.dataset.splits
    others = [name for name in splits if name != own]
    if wanted == own:
        raise InputError(
            f'finetune.test_split="{wanted}" is what data.split trains on: give another split '
            f"({', '.join(others) or 'there is none'})"
        )
    found = wanted or next((name for name in TEST_SPLITS if name in others), None)
    if found is None:
        raise InputError(
            f'{shown(config.data.path)} has no split "test" or "val" to measure on ({", ".join(splits)}): '
            "mae-vit prepare ... --holdout 1/10 draws one, or give finetune.test_split"
        )
    test_index = open_index(index.folder, found, remote=index.remote)
    if not (test_index.labels >= 0).any():
        raise InputError(f'split "{found}" of {shown(config.data.path)} has no labels to measure by')
    return test_index
