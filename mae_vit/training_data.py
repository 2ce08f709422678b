"""Opens what a job trains on: augmented images, in an order, for each rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from mae_vit.batch import Batch
from mae_vit.config import Config
from mae_vit.data.feeding import training_batches
from mae_vit.data.index import ShardIndex
from mae_vit.data.loader import start_worker_server
from mae_vit.data.opening import choose_workers, make_order, make_views, normalization
from mae_vit.data.order import Order, Share
from mae_vit.data.reading import Source, open_source
from mae_vit.data.step_samples import samples_of_step
from mae_vit.data.subset import SubsetSource
from mae_vit.machine import available_cores
from mae_vit.plan import Plan
from mae_vit.skipping import Skipped
from mae_vit.training.distributed import Ranks


@dataclass(frozen=True)
class TrainingData:
    """The images that a run trains on.

    Attributes:
        index: of the split that they are of.
        samples: their numbers in it, sorted; None for all.
        source: of them, augmented.
        order: of the places in `source`.
        workers: data processes of this rank.
        mean: per-channel mean that images are normalized by (of pixels in 0..1).
        std: per-channel standard deviation.
        pin_memory: for copies to a GPU.
    """

    index: ShardIndex
    samples: np.ndarray | None
    source: Source
    order: Order
    workers: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    pin_memory: bool

    @property
    def num_samples(self) -> int:
        """Images that are trained on."""
        return len(self.source.labels)

    @property
    def identity(self) -> dict[str, Any]:
        """What tells this data from other data: its shards' fingerprint, its normalization."""
        return {
            "data.fingerprint": self.index.fingerprint,
            "data.mean": list(self.mean),
            "data.std": list(self.std),
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
        return samples_of_step(self.index, self.order, data_step, numbers=self.samples)


def open_training_data(
    config: Config, index: ShardIndex, samples: np.ndarray | None, ranks: Ranks, device: torch.device
) -> TrainingData:
    """Opens the images of a split, or some of them, and chooses source, order and workers.

    Args:
        config: of the run.
        index: of the split.
        samples: their numbers in it, sorted; None for all.
        ranks: of the run.
        device: that batches go to.

    Raises:
        InputError: for settings that do not fit the images.
    """
    section, img_size = config.data, config.model.image_hw
    mean, std = normalization(section.normalize, index.dataset, config.model.in_chans)
    views = make_views(img_size, mean, **section.augment.view_options)
    source = open_source(
        index,
        section.source,
        channels=config.model.in_chans,
        augment=views,
        memory_limit_gib=section.memory_limit_gib,
    )
    cores, on_gpu = available_cores() // ranks.local_world_size, device.type == "cuda"
    policies = views.policy is not None
    workers = choose_workers(section.workers, source, cores=cores, on_gpu=on_gpu, policies=policies)
    if workers:
        start_worker_server(policies=policies)
    order = make_order(
        index,
        samples,
        effective_batch_size=config.train.effective_batch_size,
        seed=config.run.seed,
        lanes=section.lanes,
        block_shards=section.block_shards,
        repeats=section.repeats,
    )
    return TrainingData(
        index=index,
        samples=samples,
        source=source if samples is None else SubsetSource(source, samples),
        order=order,
        workers=workers,
        mean=mean,
        std=std,
        pin_memory=on_gpu,
    )
