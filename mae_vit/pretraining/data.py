"""Opens the data of a pretraining job."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
import torch

from mae_vit.config.schema import Config, MonitorSection
from mae_vit.core.errors import InputError
from mae_vit.data.batches.augmented import AugmentedSource, open_source
from mae_vit.data.batches.loader import FixedBatches
from mae_vit.data.batches.prefetch import check_cache
from mae_vit.data.batches.subset import limit_per_class
from mae_vit.data.images.augment import Augment
from mae_vit.data.index import ShardIndex, open_whole_index
from mae_vit.data.order.permutation import draw_some
from mae_vit.data.shards.index_files import NO_LABEL
from mae_vit.data.training_data import TrainingData, open_training_data, open_training_split
from mae_vit.evaluation.few_shot import draw_shots
from mae_vit.runtime.ranks import Ranks
from mae_vit.training.evals import SHOWN_IMAGES, HeldOut, OnlineProbe

# Splits of held-out images, in order of preference.
_HELD_OUT_SPLITS = ("val", "test")
_SHOTS = 25
# Images to fit, over all classes: the closed form takes almost no time at this size.
_MAX_SUPPORT = 1000
# In more training images drawing some of each class takes long.
_FEW_TO_DRAW_FROM = 10_000_000


@dataclass(frozen=True)
class ProbeSplit:
    """The labeled images of the online probe.

    Attributes:
        support: images to fit on, by their places in the training images, or else in the held-out split.
        queries: images to score, by their sample numbers in the held-out split.
        of_training: whether `support` are training images.
        shots: largest number of `support` images of a class.
        why_none: reason for having no probe; empty if there is one.
    """

    support: np.ndarray
    queries: np.ndarray
    of_training: bool = False
    shots: int = 0
    why_none: str = ""

    def __len__(self) -> int:
        return len(self.support) + len(self.queries)


@dataclass(frozen=True)
class Data(TrainingData):
    """The images of a run.

    Attributes:
        held_out_index: index of the held-out split; None without one.
        why_none: reason for having no held-out split.
        held_out_source: images of the held-out split, without augmentation.
        probe_split: images of the online probe.
        picture_bands: bands to draw held-out images in; None for the default bands.
    """

    held_out_index: ShardIndex | None
    why_none: str
    held_out_source: AugmentedSource | None
    probe_split: ProbeSplit
    picture_bands: Sequence[int | str] | None

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        return len(self.index.dataset.classes)

    def check_labels(self) -> None:
        """Raises InputError unless all training images and some held-out ones have labels; reads all labels."""
        unlabeled = int((np.asarray(self.source.labels) == NO_LABEL).sum())
        if unlabeled and self.num_classes:
            raise InputError(
                f'{unlabeled:,} of {self.num_samples:,} images of split "{self.index.split}" have no label, and this '
                "objective needs one of each; prepare labeled images alone, or give objective.name=mae"
            )
        index = self.held_out_index
        if index is None or (index.labels >= 0).any():
            return
        raise InputError(
            f'held-out split "{index.split}" has no labels to measure with; prepare it from class folders, or draw one '
            "from train (mae-vit prepare ... --holdout 0.05)"
        )

    def probe(self, ranks: Ranks, *, batch_size: int) -> OnlineProbe | None:
        """Loads this rank's images of the online probe; None without a probe."""
        source, probe = self.held_out_source, self.probe_split
        if source is None or probe.why_none:
            return None
        fitted = replace(self.source, augment=source.augment) if probe.of_training else source
        places = np.arange(len(probe))[ranks.rank :: ranks.world_size]
        support = probe.support[places[places < len(probe.support)]]
        queries = probe.queries[places[places >= len(probe.support)] - len(probe.support)]
        # Training images may be damaged. Another then stands for one of many to fit on, for none to score.
        parts = (
            FixedBatches(fitted, support, batch_size=batch_size, replace=True),
            FixedBatches(source, queries, batch_size=batch_size),
        )
        labels = np.asarray(fitted.labels)[probe.support], np.asarray(source.labels)[probe.queries]
        return OnlineProbe(
            batches=list(chain(*parts)),
            places=torch.from_numpy(places),
            labels=torch.from_numpy(np.concatenate(labels).astype(np.int64)),
            num_support=len(probe.support),
            num_classes=self.num_classes,
        )

    def held_out(self, ranks: Ranks, *, images: int, batch_size: int) -> HeldOut | None:
        """Loads this rank's part of the fixed held-out images; None without any."""
        if self.held_out_index is None or self.held_out_source is None:
            return None
        chosen = draw_some(max(images, ranks.world_size), len(self.held_out_index))
        mine = chosen[ranks.rank :: ranks.world_size]
        source, probe = self.held_out_source, chosen[:SHOWN_IMAGES]
        return HeldOut(
            list(FixedBatches(source, mine, batch_size=batch_size)),
            next(iter(FixedBatches(source, probe, batch_size=len(probe)))),
            self.picture_bands,
        )


def open_data(config: Config, ranks: Ranks, device: torch.device) -> Data:
    """Opens the splits and chooses source and workers.

    Raises:
        InputError: for a missing, empty or damaged data folder, an unknown split, or options that
            do not suit the images.
    """
    index = open_training_split(config, ranks)
    others = index.dataset.splits.keys() - {index.split}
    split = next((name for name in _HELD_OUT_SPLITS if name in others), None)
    held_out = open_whole_index(index.folder, split, remote=index.remote) if split else None
    why_none = "" if held_out else 'no split "val" or "test"'
    if held_out and len(held_out) < ranks.world_size:
        # Every rank needs at least one image.
        why_none = f'split "{held_out.split}" has {len(held_out)} images for {ranks.world_size} ranks'
        held_out = None
    training = open_training_data(config, index, _choose(config, index), ranks, device)
    check_cache(
        index, training.source, training.order, world_size=ranks.world_size, node_ranks=ranks.local_world_size
    )
    held_out_source = None
    if held_out:
        held_out_source = open_source(
            held_out,
            "auto",
            channels=config.model.channels,
            augment=Augment(img_size=config.model.image_hw),
            memory_limit_gib=config.data.memory_limit_gib,
        )
    return Data(
        **vars(training),
        held_out_index=held_out,
        why_none=why_none,
        held_out_source=held_out_source,
        probe_split=choose_probe(config.monitor, training, held_out, ranks.world_size, why_none),
        picture_bands=config.monitor.picture_bands,
    )


def _choose(config: Config, index: ShardIndex) -> np.ndarray | None:
    """Chooses the samples to train on; None for all."""
    limit = config.data.leave_out_per_class
    if limit is None:
        return None
    labels, keys, first = np.asarray(index.labels), index.keys(), config.data.label_draw
    labeled = np.flatnonzero(labels >= 0)
    rest = np.arange(len(labels))
    for draw in range(first, first + config.data.leave_out_draws):
        taken, _ = limit_per_class(labeled, labels, keys, limit, draw=draw)
        rest = np.setdiff1d(rest, taken)
    if not len(rest):
        draws = f" data.leave_out_draws={config.data.leave_out_draws}" * (config.data.leave_out_draws > 1)
        raise InputError(f'data.leave_out_per_class={limit}{draws} leaves nothing of split "{index.split}"')
    return rest


def choose_probe(
    monitor: MonitorSection, training: TrainingData, index: ShardIndex | None, world_size: int, why_none: str
) -> ProbeSplit:
    """Chooses images for the probe: to fit, of the training images that have labels, else of the held-out ones.

    If `index`, of the held-out split, is None, `why_none` says why there is none.
    """

    def none(why: str) -> ProbeSplit:
        return ProbeSplit(np.zeros(0, np.int64), np.zeros(0, np.int64), why_none=why)

    if index is None:
        return none(why_none)
    if not monitor.probe_queries:
        return none("monitor.probe_queries=0")
    labels, most = np.asarray(index.labels), max(1, _MAX_SUPPORT // max(1, len(index.dataset.classes)))
    shots, fitted = min(_SHOTS, most), labels
    support, queries = draw_shots(labels, shots=shots, queries=monitor.probe_queries)
    # Images elsewhere are not fetched for it.
    near = training.index.remote is None and training.num_samples <= _FEW_TO_DRAW_FROM
    if of_training := near and sum(np.asarray(training.index.split_info.class_counts) > 0) > 1:
        fitted = np.asarray(training.source.labels)
        support, _ = draw_shots(fitted, shots=shots, queries=0)
        _, queries = draw_shots(labels, shots=0, queries=monitor.probe_queries)
    if len(np.unique(fitted[support])) < 2 or not len(queries):
        return none(f'split "{index.split}" has no labels of two classes, with two images of each')
    if len(support) + len(queries) < world_size:
        return none(f'split "{index.split}" has fewer labeled images than there are ranks')
    return ProbeSplit(support, queries, of_training, int(np.bincount(fitted[support]).max()))
