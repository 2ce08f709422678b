"""Augmented images of a source: crop, flip, policy and erasing, drawn from the samples' keys."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np
import torch

from mae_vit.core.errors import Damage, DamagedSample, InputError
from mae_vit.data.batches.sources import MemorySource, Sample, StoredMasks, TarSource
from mae_vit.data.images.augment import Augment, AugmentParams, crop_mask
from mae_vit.data.images.batched import MOST_PX, boxes_and_flips, cached_crop, resizes
from mae_vit.data.index import ShardIndex

# Bytes decoded before cropping starts. A large image is cropped at once, while it is in the CPU cache: decoding the
# whole batch first takes a fifth longer. Small images are decoded together: alternating takes up to half longer,
# because the code for decoding and the code for cropping evict each other from the cache.
_TOGETHER_BYTES = 1 << 18
# Values that are resized together: a CPU's cache holds them and their weights.
_RESIZED_TOGETHER = 1 << 17


class Views(NamedTuple):
    """Augmented images of some samples.

    Attributes:
        images: (B, C, H, W), uint8 or raw values of bands.
        labels: int64 (B,), -1 where there is none.
        masks: uint16 (B, H, W), class + 1 of each pixel, 0 where it does not count; None without masks.
    """

    images: np.ndarray
    labels: np.ndarray
    masks: np.ndarray | None


@dataclass(frozen=True)
class AugmentedSource:
    """All or some samples of a source, augmented for training or evaluation.

    Samples are addressed by place, 0..len-1. A view's random draws are keyed by the sample's number in the source, so
    an image gets the same crop in every part of the source. `samples` int64 (n,) are the numbers in the source that
    belong to this part, ascending; None for all.
    """

    source: TarSource
    augment: Augment
    samples: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.source.labels) if self.samples is None else len(self.samples)

    @property
    def labels(self) -> np.ndarray:
        """Int (n,), -1 for a sample without a label."""
        return self.source.labels if self.samples is None else np.asarray(self.source.labels)[self.samples]

    @property
    def shape(self) -> tuple[int, int, int]:
        """(C, H, W) of an augmented image."""
        return (self.source.channels, *self.augment.img_size)

    @property
    def in_memory(self) -> bool:
        """Whether images are read from memory."""
        return isinstance(self.source, MemorySource)

    @property
    def reads_shards(self) -> bool:
        """Whether reading a sample opens its shard: for its image or its mask."""
        return not self.in_memory or self.source.has_masks

    def numbers(self, places: np.ndarray) -> np.ndarray:
        """Returns the numbers in the source, int64 (B,), of the samples at `places` (B,)."""
        return places if self.samples is None else self.samples[places]

    def render(
        self,
        seed: int,
        epoch: int,
        places: np.ndarray,
        keys: np.ndarray | None = None,
        out: Views | None = None,
    ) -> Views:
        """Reads and augments samples at `places` int64 (B,). One that occurs several times in a row is decoded once.

        `keys` int64 (B,) are those of each view's random draws, by default `numbers(places)`; `out` receives the views.

        Raises:
            DamagedSample: if samples cannot be read; names all of them.
        """
        samples = self.numbers(places)
        drawn = self.augment.draw(seed, epoch, samples if keys is None else keys)
        count, source = len(places), self.source
        if out is None:
            masks = np.empty((count, *self.augment.img_size), np.uint16) if source.has_masks else None
            out = Views(np.empty((count, *self.shape), source.dtype), np.empty(count, np.int64), masks)
        if isinstance(source, MemorySource) and not source.has_masks:
            out.images[:] = self._augment_batch(source.gather(samples), drawn)
            out.labels[:] = source.labels[samples]
            return out
        self._render_each(samples, drawn, out)
        self.augment.apply_policy_and_erasing(out.images, drawn)
        return out

    def _augment_batch(self, images: np.ndarray, drawn: AugmentParams) -> np.ndarray:
        """Returns `Augment.apply`; resizes small images together, in a fifth of its time."""
        augment, size = self.augment, (images.shape[2], images.shape[3])
        small = augment.bands.eight_bit and max(*size, *augment.img_size) <= MOST_PX
        if not (small and resizes(augment, size)):
            return augment.apply(images, drawn)
        crop = cached_crop(size, augment.img_size, augment.interpolation, torch.device("cpu"))
        boxes = torch.from_numpy(boxes_and_flips(augment, drawn, size))
        views = np.empty((len(images), *self.shape), np.uint8)
        together = max(1, _RESIZED_TOGETHER // images[0].size)
        for first in range(0, len(images), together):
            part = slice(first, first + together)
            views[part] = crop(torch.from_numpy(images[part]), boxes[part]).numpy()
        augment.apply_policy_and_erasing(views, drawn)
        return views

    def _render_each(self, samples: np.ndarray, drawn: AugmentParams, views: Views) -> None:
        damaged = list[tuple[int, Damage]]()
        # Views of one sample are adjacent, at begin..end-1.
        begins = np.flatnonzero(np.diff(samples, prepend=-1)).tolist()
        decoded, size = list[tuple[int, Sample]](), 0
        for begin, end in zip(begins, [*begins[1:], len(samples)], strict=True):
            try:
                sample = self.source.read(int(samples[begin]))
            except DamagedSample as error:
                damaged += [(position, error.damaged[0][1]) for position in range(begin, end)]
                continue
            decoded += [(position, sample) for position in range(begin, end)]
            size += sample.pixels.nbytes
            if size > _TOGETHER_BYTES:
                self._crop(decoded, drawn, views)
                decoded, size = [], 0
        self._crop(decoded, drawn, views)
        if damaged:
            raise DamagedSample(damaged, self.source.index.folder)

    def _crop(self, decoded: list[tuple[int, Sample]], drawn: AugmentParams, views: Views) -> None:
        """Crops, resizes and flips samples, each with its position, and their masks into `views`."""
        augment, sizes = self.augment, [sample.pixels.shape[1:] for _, sample in decoded]
        boxes = augment.boxes(drawn, sizes, [position for position, _ in decoded]).tolist() if decoded else ()
        for (position, sample), box in zip(decoded, boxes, strict=True):
            flip = bool(drawn.flips[position])
            views.images[position] = augment.crop_resize_flip(sample.pixels, box, flip)
            views.labels[position] = sample.label
            if views.masks is not None and sample.mask is not None:
                views.masks[position] = crop_mask(sample.mask, box, flip, augment.img_size)


def open_source(
    index: ShardIndex,
    name: Literal["auto", "memory", "tar"],
    *,
    channels: int,
    augment: Augment,
    memory_limit_gib: float,
    masks: bool = False,
) -> AugmentedSource:
    """Opens the samples of a split.

    The source "auto" is "memory" if all images have one size and fit into `memory_limit_gib`, else "tar".

    Raises:
        InputError: if "memory" is given and the images differ in size or do not fit, if the policy does not support
            the images' bands, or if there are no masks.
    """
    bands = index.bands
    if augment.policy and not (bands.eight_bit and len(bands.names) in (0, 1, 3)):
        raise InputError(
            f'data.augment.policy="{augment.policy.name}" needs 8-bit gray or RGB; the images have '
            f"{len(bands.names)} bands of {bands.dtype}. Use data.augment.policy=none (crop, flip and erasing work)"
        )
    height, width = index.split_info.height[1], index.split_info.width[1]
    gib = len(index) * channels * height * width * np.dtype(bands.dtype).itemsize / 2**30
    if name == "auto":
        name = "memory" if index.one_size is not None and gib <= memory_limit_gib else "tar"
    if name == "memory" and index.one_size is None:
        raise InputError(
            'data.source="memory" needs images of one size, and this split has several; use data.source=tar'
        )
    if name == "memory" and gib > memory_limit_gib:
        raise InputError(
            f'data.source="memory" needs {gib:.1f} GiB, more than data.memory_limit_gib={memory_limit_gib}; raise '
            "it or use data.source=tar"
        )
    stored_masks = StoredMasks(index) if masks else None
    reader = MemorySource if name == "memory" else TarSource
    source = reader(index, channels=channels, masks=stored_masks)
    return AugmentedSource(source, replace(augment, bands=bands))
