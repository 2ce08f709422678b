"""Opens the data of a fine-tuning job: training, held-out and test images."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from mae_vit.core.errors import InputError
from mae_vit.core.urls import redact_url
from mae_vit.data.batches.augmented import AugmentedSource, open_source
from mae_vit.data.batches.loader import FixedBatches
from mae_vit.data.batches.prefetch import check_cache
from mae_vit.data.batches.subset import draw_held_out, limit_per_class
from mae_vit.data.data_path import describe_data, set_channels, with_channels
from mae_vit.data.images.augment import Augment, Interpolation
from mae_vit.data.index import ShardIndex, check_held_out, open_whole_index
from mae_vit.data.order.permutation import draw_some
from mae_vit.data.shards.dataset_json import Segmentation
from mae_vit.data.training_data import TrainingData, open_training_data, open_training_split
from mae_vit.finetuning.config.recipes import what_is_missing
from mae_vit.finetuning.config.schema import FinetuneConfig
from mae_vit.runtime.ranks import Ranks
from mae_vit.training.evals import SHOWN_IMAGES, HeldOut
from mae_vit.weights.load import fit_normalization
from mae_vit.weights.read import Weights

# Training images that are measured, at most.
_MEASURED_TRAIN = 10_000
# The most that a dry run fetches without asking: some seconds on a fast line.
_PLANNED_GIB = 1.0


@dataclass(frozen=True)
class FinetuneData(TrainingData):
    """The training, held-out and test images of a run.

    Attributes:
        held_out: int64 (n,), ascending numbers of samples that choose epoch or rate; empty without `holdout`.
        plain: reads all images of the training split without augmentation.
        test_index: index of the test split. Nothing opens its images before the end of the run.
    """

    config: FinetuneConfig
    held_out: np.ndarray
    plain: AugmentedSource
    test_index: ShardIndex

    @property
    def train(self) -> np.ndarray:
        """Int64 (n,), the training samples, ascending."""
        assert self.samples is not None
        return self.samples

    @property
    def classes(self) -> list[str]:
        """Names of the classes; a label, or a pixel's class, is an index into them."""
        return (self._segmentation or self.index.dataset).classes

    @property
    def _segmentation(self) -> Segmentation | None:
        """The meaning of the masks; None in modes that read none."""
        return self.index.dataset.segmentation if self.config.mode.labels == "mask" else None

    @property
    def test(self) -> np.ndarray:
        """Int64 (n,), the test samples: all samples of the test split that have a label, or a mask."""
        return np.flatnonzero(read_labels(self.config, self.test_index) >= 0)

    @property
    def identity(self) -> dict[str, Any]:
        """Returns the values that must not change when the run resumes."""
        return {
            **super().identity,
            "finetune.test_split": self.test_index.split,
            "finetune.test_fingerprint": self.test_index.fingerprint,
            **{f"data.masks.{name}": value for name, value in self._segmentation or ()},
        }

    def fixed(
        self,
        source: AugmentedSource,
        samples: np.ndarray,
        ranks: Ranks,
        batch_size: int,
        *,
        replace: bool = False,
    ) -> FixedBatches:
        """Returns this rank's share of `samples`, every world_size-th, as batches.

        With `replace`, intact samples replace damaged ones, which otherwise are errors.
        """
        return FixedBatches(
            source,
            samples[ranks.rank :: ranks.world_size],
            batch_size=batch_size,
            # For images in memory, starting worker processes takes longer than gathering the images.
            workers=self.workers if source.reads_shards else 0,
            replace=replace,
        )

    def held_out_batches(self, ranks: Ranks, *, batch_size: int) -> HeldOut | None:
        """Returns this rank's held-out images and some for pictures; None without held-out images."""
        if not len(self.held_out):
            return None
        shown = self.held_out[draw_some(SHOWN_IMAGES, len(self.held_out))]
        return HeldOut(
            self.fixed(self.plain, self.held_out, ranks, batch_size),
            next(iter(FixedBatches(self.plain, shown, batch_size=len(shown)))),
            self.config.monitor.picture_bands,
        )

    def digest(self, samples: np.ndarray) -> str | None:
        """Returns a digest of the keys of training samples; None if no labels were drawn."""
        if not len(samples) or not (len(self.held_out) or self.config.data.labels_per_class):
            return None
        keys = self.index.keys()
        text = "\n".join(sorted(keys[sample] for sample in samples))
        return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:16]

    def some_of_train(self) -> np.ndarray:
        """Draws the training samples that are measured, ascending; the same in runs of all seeds."""
        return np.sort(self.train[draw_some(_MEASURED_TRAIN, len(self.train))])

    def open_test(self) -> AugmentedSource:
        """Opens the images of the test split. Call it once, at the end of a run."""
        section = self.config.data
        return open_source(
            self.test_index,
            "auto" if section.source == "memory" else section.source,
            channels=self.config.model.channels,
            augment=self.plain.augment,
            memory_limit_gib=section.memory_limit_gib,
            masks=self.plain.source.has_masks,
        )


def fit_to_data(config: FinetuneConfig, weights: Weights | None, *, say: bool = False) -> FinetuneConfig:
    """Returns the config with the channels and the normalization that fit weights and data.

    Weights bring their own number of channels and normalization into a config. If the data have other bands, the
    data's values win, and `load_weights` adapts the patch projection.

    Raises:
        InputError: if the data are missing, or `model.in_chans` contradicts them.
    """
    dataset = describe_data(config)
    channels, bands = dataset.channels, dataset.bands
    if weights is None or weights.mean is None or weights.std is None:
        return with_channels(config, dataset)
    theirs = len(weights.mean)
    fits = theirs == channels or (bands.photographs and theirs in (1, 3))
    if config.model.in_chans == theirs and not fits:
        config = set_channels(config, channels)
        if say:
            print(f"model.in_chans={channels}, as the data; {weights.source} was trained on {theirs}")
    if config.model.in_chans is None and fits:
        config = set_channels(config, theirs)
    config = with_channels(config, dataset)
    if config.data.normalize != [[*weights.mean], [*weights.std]]:
        return config
    fitted = fit_normalization(weights, bands, config.model.channels)
    normalize = "dataset" if fitted is None else [[*fitted[0]], [*fitted[1]]]
    if fitted is None and say:
        print(f"data.normalize=dataset: {weights.source} was trained on other bands")
    return config.model_copy(update={"data": config.data.model_copy(update={"normalize": normalize})})


def open_data(
    config: FinetuneConfig,
    ranks: Ranks,
    device: torch.device,
    *,
    interpolation: Interpolation = "bicubic",
    dry_run: bool = False,
) -> FinetuneData:
    """Opens the splits and chooses samples, source and workers; `interpolation` resizes images.

    A `dry_run` does not fetch many shards.

    Raises:
        InputError: if data or a split is missing, damaged or without labels, or if options do not fit the images.
    """
    # Training alone replaces damaged samples.
    index = open_training_split(config, ranks, whole=not config.mode.augment)
    test_index = _open_test_index(config, index)
    if dry_run and (config.data.labels_per_class is not None or config.finetune.holdout):
        _check_names_near(index)
    train, held_out = _choose(config, index, ranks)
    check_held_out(index, held_out)
    masks = config.mode.labels == "mask"
    training = open_training_data(
        config, index, train, ranks, device, interpolation=interpolation, masks=masks
    )
    if config.mode.augment:
        world, node = ranks.world_size, ranks.local_world_size
        check_cache(index, training.source, training.order, world_size=world, node_ranks=node)
    bands = index.dataset.bands
    plain = Augment(img_size=config.model.image_hw, bands=bands, interpolation=interpolation)
    return FinetuneData(
        **vars(training),
        config=config,
        held_out=held_out,
        plain=replace(training.source, augment=plain, samples=None),
        test_index=test_index,
    )


def read_labels(config: FinetuneConfig, index: ShardIndex) -> np.ndarray:
    """Returns labels int (N,), -1 for unused samples; with masks all are used, unlabeled ones as class 0."""
    labels = np.asarray(index.labels)
    return np.maximum(labels, 0) if config.mode.labels == "mask" else labels


def _check_names_near(index: ShardIndex) -> None:
    """Rejects a dry run that would fetch much: images are drawn by their names, which are in all shards."""
    gib = sum(shard.bytes for shard in index.split_info.shards) / 2**30
    if index.remote is None or gib <= _PLANNED_GIB or index.cache_path("keys.json").exists():
        return
    raise InputError(
        f"--dry-run would fetch {gib:.3g} GiB of {redact_url(index.remote.url)} to draw images by name; leave it "
        "out, or use finetune.holdout=0 and all labels"
    )


def _choose(config: FinetuneConfig, index: ShardIndex, ranks: Ranks) -> tuple[np.ndarray, np.ndarray]:
    """Chooses training and held-out samples: draws the labeled subset, then the held-out share of it."""
    labels = read_labels(config, index)
    samples = np.flatnonzero(labels >= 0)
    if config.mode.labels == "class" and len(np.unique(labels[samples])) < 2:
        raise InputError(
            f'split "{index.split}" of {redact_url(config.data.path)} does not have labels of two classes, which '
            "fine-tuning needs; prepare it from class folders or with --labels"
        )
    limit, share = config.data.labels_per_class, config.finetune.holdout
    if limit is None and not share:
        return samples, samples[:0]
    keys = index.keys()
    if limit is not None:
        counts, asked = np.bincount(labels[samples]), f"data.labels_per_class={limit}"
        fewest, short = counts.min(), int((counts < limit).sum())
        if short == len(counts):
            raise InputError(f"{asked} is more than any class has; give {counts[counts > 0].min()} or fewer")
        if short and ranks.rank == 0:
            print(f"{asked}: {short} of {len(counts)} classes have fewer (fewest: {fewest})")
        samples, _ = limit_per_class(samples, labels, keys, limit, draw=config.data.label_draw)
    if config.mode.trains == "nothing" or not share:
        # Without training there is nothing to choose.
        return samples, samples[:0]
    held_out, train = draw_held_out(samples, labels, keys, share, draw=config.data.label_draw)
    if len(held_out) < ranks.world_size:
        chosen = "epoch" if config.mode.augment else "rate"
        raise InputError(
            f"finetune.holdout={share:g} of {len(samples)} images leaves {len(held_out)} to choose the {chosen}; "
            "give more labels, or finetune.holdout=0"
        )
    return train, held_out


def _open_test_index(config: FinetuneConfig, index: ShardIndex) -> ShardIndex:
    dataset, masks = index.dataset, config.mode.labels == "mask"
    split = dataset.test_split(index.split, masks=masks)
    if split is None:
        missing = what_is_missing(dataset, index.split, masks=masks)
        modes = "" if masks or not dataset.segmentation else ", or use finetune.mode=segment or segment_probe"
        raise InputError(f"{redact_url(config.data.path)} {missing}{modes}")
    return open_whole_index(index.folder, split, remote=index.remote)
