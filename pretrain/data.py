"""Opens the data of a pretraining job."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mae_vit.batch import Batch
from mae_vit.config import AugmentSection, Config, MonitorSection
from mae_vit.data.augment import Augment
from mae_vit.data.blocks import BlockOrder
from mae_vit.data.dataset import Dataset
from mae_vit.data.index import ShardIndex, open_index
from mae_vit.data.loader import fixed_batches, load_batches, start_worker_server
from mae_vit.data.order import GlobalOrder, Order, Share, permute
from mae_vit.data.reading import MemorySource, Source, open_source
from mae_vit.errors import InputError
from mae_vit.evaluation.few_shot import draw_shots
from mae_vit.keyed import Stream, derive_key
from mae_vit.plan import Plan
from mae_vit.training.distributed import Ranks, available_cores
from mae_vit.training.evaluate import HeldOut
from mae_vit.training.probe import OnlineProbe

# Channel statistics of ImageNet, as torchvision's models and the official MAE code use.
_IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
# Where held-out images are looked for, best first.
_HELD_OUT_SPLITS = ("val", "test")
# Not the run's seed: runs of all seeds are measured on the same images and masks.
_HELD_OUT_SEED = 0
_MAX_AUTO_WORKERS = 16
_MAX_PROBE_SUPPORT = 1000


@dataclass(frozen=True)
class Data:
    """The images of a run.

    Attributes:
        index: of the training split.
        source: its augmented images.
        order: of its samples.
        workers: data processes of this rank.
        mean: per-channel mean that images are normalized by (of pixels in 0..1).
        std: per-channel standard deviation.
        held_out_index: of the held-out split, None where there is none.
        held_out_source: its images without augmentation.
        pin_memory: for copies to a GPU.
    """

    index: ShardIndex
    source: Source
    order: Order
    workers: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    held_out_index: ShardIndex | None
    held_out_source: Source | None
    pin_memory: bool

    @property
    def num_samples(self) -> int:
        """Images in the training split."""
        return len(self.index)

    @property
    def num_classes(self) -> int:
        """Classes of the labels; 0 if any image has none."""
        labeled = int(self.source.labels.min()) >= 0
        return len(self.index.dataset.classes) if labeled else 0

    @property
    def identity(self) -> dict[str, Any]:
        """What tells this data from other data: its shards' fingerprint, its normalization."""
        return {
            "data.fingerprint": self.index.fingerprint,
            "data.mean": list(self.mean),
            "data.std": list(self.std),
        }

    def batches(self, ranks: Ranks, plan: Plan, start_step: int) -> Iterator[Batch]:
        """Yields this rank's micro-batches from `start_step` to the end of the run."""
        return load_batches(
            self.source,
            self.order,
            Share(ranks.rank, ranks.world_size, plan.accumulation),
            start_step=start_step,
            stop_step=plan.total_steps,
            workers=self.workers,
            pin_memory=self.pin_memory,
        )

    def probe_split(self, monitor: MonitorSection) -> tuple[np.ndarray, np.ndarray]:
        """Chooses labeled held-out images to fit on and to score; empty where there is no probe."""
        nothing = np.zeros(0, np.int64)
        if self.held_out_source is None or not monitor.probe_queries or len(self.index.dataset.classes) < 2:
            return nothing, nothing
        classes = len(self.index.dataset.classes)
        shots = max(1, min(monitor.probe_shots, _MAX_PROBE_SUPPORT // classes))
        labels = np.asarray(self.held_out_source.labels)
        support, queries = draw_shots(labels, shots=shots, queries=monitor.probe_queries)
        return (support, queries) if len(support) and len(queries) else (nothing, nothing)

    def probe(self, ranks: Ranks, monitor: MonitorSection, *, batch_size: int) -> OnlineProbe | None:
        """Loads the online probe, this rank's part of its images; None where there is none."""
        support, queries = self.probe_split(monitor)
        samples = np.concatenate([support, queries])
        if len(samples) < ranks.world_size or self.held_out_source is None:
            return None
        places = np.arange(len(samples))[ranks.rank :: ranks.world_size]
        source = self.held_out_source
        return OnlineProbe(
            batches=list(fixed_batches(source, samples[places], seed=_HELD_OUT_SEED, batch_size=batch_size)),
            places=torch.from_numpy(places),
            labels=torch.from_numpy(np.asarray(source.labels)[samples].astype(np.int64)),
            num_support=len(support),
            num_classes=len(self.index.dataset.classes),
        )

    def held_out(self, ranks: Ranks, *, images: int, picture_images: int, batch_size: int) -> HeldOut | None:
        """Loads fixed held-out images, this rank's part of them; None where there are none, or fewer than ranks."""
        if self.held_out_index is None or self.held_out_source is None:
            return None
        total = len(self.held_out_index)
        if total < ranks.world_size:
            return None  # a rank without images could not take part
        key = derive_key(_HELD_OUT_SEED, Stream.ORDER, 0)
        chosen = permute(np.arange(min(max(images, ranks.world_size), total)), total, key)
        mine = chosen[ranks.rank :: ranks.world_size]
        source, probe = self.held_out_source, chosen[:picture_images]
        return HeldOut(
            list(fixed_batches(source, mine, seed=_HELD_OUT_SEED, batch_size=batch_size)),
            next(fixed_batches(source, probe, seed=_HELD_OUT_SEED, batch_size=len(probe))),
        )


def open_data(config: Config, ranks: Ranks, device: torch.device) -> Data:
    """Opens the splits and chooses source and workers.

    Raises:
        InputError: for a missing, empty or damaged data folder, an unknown split, or
            settings that do not fit the images.
    """
    section, img_size = config.data, config.model.image_hw
    index = open_index(Path(section.path), section.split)
    augment = section.augment
    _check_pad(config, index)
    source = open_source(
        index,
        section.source,
        channels=config.model.in_chans,
        augment=Augment(
            img_size=img_size,
            crop=augment.crop,
            flip=augment.flip,
            **crop_options(augment),
        ),
        memory_limit_gib=section.memory_limit_gib,
    )
    workers = section.workers if isinstance(section.workers, int) else _auto_workers(source, ranks, device)
    if workers:
        start_worker_server()
    mean, std = normalization(section.normalize, index.dataset, config.model.in_chans)
    held_out = _held_out_index(config, index)
    return Data(
        index=index,
        source=source,
        order=make_order(config, index),
        workers=workers,
        mean=mean,
        std=std,
        held_out_index=held_out,
        held_out_source=open_source(
            held_out,
            "auto",
            channels=config.model.in_chans,
            augment=Augment(img_size=img_size),
            memory_limit_gib=section.memory_limit_gib,
        )
        if held_out
        else None,
        pin_memory=device.type == "cuda",
    )


def make_order(config: Config, index: ShardIndex) -> Order:
    """Returns the order of samples that the config asks for."""
    section, batch, seed = config.data, config.train.effective_batch_size, config.run.seed
    if section.lanes is None or section.block_shards is None:
        return GlobalOrder(len(index), batch, seed)
    return BlockOrder(
        [shard.samples for shard in index.split_info.shards],
        effective_batch_size=batch,
        seed=seed,
        lanes=section.lanes,
        block_shards=section.block_shards,
    )


def crop_options(augment: AugmentSection) -> dict[str, Any]:
    """The options of the chosen crop; those of the others are unset."""
    options: dict[str, Any] = {}
    if augment.pad_px is not None:
        options["pad_px"] = augment.pad_px
    if augment.scale is not None and augment.ratio is not None:
        options["scale"] = (augment.scale[0], augment.scale[1])
        options["ratio"] = (augment.ratio[0], augment.ratio[1])
    return options


def _auto_workers(source: Source, ranks: Ranks, device: torch.device) -> int:
    """Processes per rank: none where images lie in memory; else this rank's cores but one."""
    if isinstance(source, MemorySource):
        return 0
    spare = available_cores() // ranks.local_world_size - 1
    # On a CPU the trainer keeps all cores busy itself.
    return (
        min(_MAX_AUTO_WORKERS, max(1, spare))
        if device.type == "cuda"
        else min(_MAX_AUTO_WORKERS, max(0, spare))
    )


def _check_pad(config: Config, index: ShardIndex) -> None:
    split, img_size = index.split_info, config.model.image_hw
    stored = (split.height[0], split.width[0])
    if config.data.augment.crop == "pad" and (
        stored != img_size or (split.height[1], split.width[1]) != img_size
    ):
        height, width = (
            str(low) if low == high else f"{low}-{high}" for low, high in (split.height, split.width)
        )
        raise InputError(
            f'data.augment.crop="pad" needs images of model.img_size={config.model.img_size}, but '
            f'split "{index.split}" holds {height} x {width} px: use data.augment.crop=random_resized'
        )


def _held_out_index(config: Config, index: ShardIndex) -> ShardIndex | None:
    """Opens the split that is measured but not trained on."""
    path, wanted = Path(config.data.path), config.monitor.evaluate_split
    if wanted is not None:
        if wanted == config.data.split:
            others = sorted(set(index.dataset.splits) - {wanted})
            raise InputError(
                f'monitor.evaluate_split="{wanted}" is what data.split trains on: '
                f"give another split ({', '.join(others) or 'there is none'})"
            )
        return open_index(path, wanted)
    present = [
        name for name in _HELD_OUT_SPLITS if name in index.dataset.splits and name != config.data.split
    ]
    return open_index(path, present[0]) if present else None


def normalization(
    choice: str | list[list[float]], dataset: Dataset, channels: int
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Resolves `data.normalize` to per-channel mean and std of pixels in 0..1.

    Raises:
        InputError: if the statistics do not fit the channels.
    """
    if choice == "half":
        return (0.5,) * channels, (0.5,) * channels
    if isinstance(choice, list):
        if len(choice) != 2 or any(len(part) != channels for part in choice) or min(choice[1]) <= 0:
            raise InputError(f"data.normalize={choice}: give [[{channels} means], [{channels} stds above 0]]")
        return tuple(choice[0]), tuple(choice[1])
    mean, std = _IMAGENET if choice == "imagenet" else (tuple(dataset.mean), tuple(dataset.std))
    if len(mean) == 1 and channels == 3:
        mean, std = mean * 3, std * 3
    if len(mean) != channels:
        raise InputError(
            f'data.normalize="{choice}" has {len(mean)} channels, model.in_chans={channels}: '
            'use "half" or [[mean], [std]]'
        )
    # A channel of one value would divide by zero.
    return mean, tuple(max(value, 1e-3) for value in std)
