"""Sources of augmented batches: `tar` decodes on demand, `memory` decodes all images once.

Both give the same pixels for the same (seed, epoch, sample index).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, Protocol

import numpy as np

from mae_vit.core.bands import Bands
from mae_vit.core.errors import DamagedSample, InputError
from mae_vit.data.batches.decoded import (
    array_bytes,
    check_size,
    decode_sample,
    decoded_array,
    dtype_of,
    warn_of_changes,
)
from mae_vit.data.images.augment import Augment
from mae_vit.data.images.bands.raster import Raster
from mae_vit.data.images.bands.read import open_bands
from mae_vit.data.images.decode import DecodeError, decode, jpeg_size
from mae_vit.data.index import ShardIndex
from mae_vit.data.shards.shard_files import ReadError


class Source(Protocol):
    """Gives labels and augmented images by place, 0..N-1."""

    @property
    def labels(self) -> np.ndarray:
        """Int (N,), -1 for a sample without a label."""

    def labels_of(self, index: np.ndarray) -> np.ndarray:
        """Int (B,), the labels of samples `index` (B,), without loading all labels."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """(C, H, W) of an augmented image."""

    @property
    def dtype(self) -> np.dtype:
        """Type of an augmented image's values: uint8 for photographs, else that of the bands."""

    @property
    def in_memory(self) -> bool:
        """Whether images are read from memory; reading a sample then opens no shard."""

    @property
    def mask_planes(self) -> int:
        """How many of the channels, the last ones, are a mask (`mae_vit.data.batches.masks`)."""

    def numbers(self, places: np.ndarray) -> np.ndarray:
        """Int64 (B,), the numbers in the split of the samples at `places` (B,)."""

    def images(
        self,
        seed: int,
        epoch: int,
        samples: np.ndarray,
        views: np.ndarray | None = None,
        out: np.ndarray | None = None,
    ) -> np.ndarray:
        """Computes augmented images. A sample that occurs several times in a row is decoded once.

        Args:
            seed: the run's seed.
            epoch: from 0.
            samples: int64 (B,), places of the samples.
            views: int64 (B,), the key of each image's random draws; `samples` if None.
            out: (B, C, H, W) of `dtype`, receives the images; new memory if None.

        Returns:
            (B, C, H, W) of `dtype`; `out` if it is given.

        Raises:
            DamagedSample: names all samples that cannot be read.
        """


class _IndexedSource:
    """Common parts of the sources that read all samples of one index."""

    in_memory = False
    mask_planes = 0

    def __init__(self, index: ShardIndex, *, channels: int, augment: Augment) -> None:
        """Reads the samples of `index` in `channels` channels."""
        self._index, self._channels = index, channels
        self._bands = index.dataset.bands
        self._augment = augment if self._bands is None else replace(augment, bands=self._bands)

    @property
    def labels(self) -> np.ndarray:
        """Int (N,), -1 where there is none."""
        return self._index.labels

    def labels_of(self, index: np.ndarray) -> np.ndarray:
        """Int (B,), the labels of samples `index` (B,)."""
        return self._index.labels_of(index)

    @property
    def shape(self) -> tuple[int, int, int]:
        """(C, H, W) of the augmented images."""
        return (self._channels, *self._augment.img_size)

    @property
    def dtype(self) -> np.dtype:
        """Type of the augmented images' values."""
        return dtype_of(self._bands)

    def numbers(self, places: np.ndarray) -> np.ndarray:
        """Returns `places`: a sample's place in this source is its number in the split."""
        return places


class TarSource(_IndexedSource):
    """Reads, decodes and crops each sample on demand (for large images)."""

    def __init__(self, index: ShardIndex, *, channels: int, augment: Augment) -> None:
        """Reads the samples of `index` in `channels` channels."""
        super().__init__(index, channels=channels, augment=augment)
        self._size = index.one_size

    def images(
        self,
        seed: int,
        epoch: int,
        samples: np.ndarray,
        views: np.ndarray | None = None,
        out: np.ndarray | None = None,
    ) -> np.ndarray:
        """Computes augmented images: (B, C, H, W), see `Source`."""
        damaged: dict[int, str] = {}
        opened: list[tuple[bytes | np.ndarray | Raster, tuple[int, int]]] = []
        # Views of one image follow each other: they begin at `begins` (n,), and each image is read once.
        begins = np.flatnonzero(np.diff(samples, prepend=-1))
        counts = np.diff(begins, append=len(samples))
        once = samples[begins]
        # Where sizes are known, bands are read one at a time too: each takes some MB.
        known = self._size if self._bands is not None else None
        for place, sample in enumerate(once.tolist()):
            if known is not None:
                opened.append((b"", known))
                continue
            try:
                opened.append(self._open(sample))
            except (ReadError, DecodeError) as error:
                damaged[place] = str(error)
                opened.append((b"", self._augment.img_size))
        sizes = np.repeat(np.array([size for _, size in opened], np.int64), counts, axis=0)
        drawn = self._augment.draw(seed, epoch, samples if views is None else views, sizes)
        out = np.empty((len(samples), *self.shape), self.dtype) if out is None else out
        # Decode and crop one image at a time: each reuses the memory of the one before, which is
        # still in the CPU cache. Decoding all images before cropping takes a fifth longer.
        for place, (image, size) in enumerate(opened):
            if place in damaged:
                continue
            try:
                pixels = self._decode(image if known is None else self._open(int(once[place]))[0])
                check_size(pixels.shape[1:], size)
            except (ReadError, DecodeError) as error:
                damaged[place] = str(error)
                continue
            for position in range(begins[place], begins[place] + counts[place]):
                out[position] = self._augment.crop_resize_flip(
                    pixels, drawn.boxes[position], drawn.flips[position]
                )
        if damaged:
            damages = [(place, self._index.damage(int(once[place]), why)) for place, why in damaged.items()]
            raise DamagedSample(
                sorted(
                    (int(begins[place] + k), damage)
                    for place, damage in damages
                    for k in range(counts[place])
                ),
                self._index.folder,
            )
        self._augment.apply_policy_and_erasing(out, drawn)
        return out

    def _open(self, sample: int) -> tuple[bytes | np.ndarray | Raster, tuple[int, int]]:
        """Reads a sample and its (height, width). Boxes are drawn for a whole batch, so sizes come first.

        Returns:
            The encoded bytes or opened bands, and the size. If only decoding reveals the size, the pixels and the size.
        """
        data = self._index.read(sample)
        if self._bands is not None:
            raster = open_bands(data, self._bands)
            check_size((raster.height, raster.width), self._size)
            return raster, (raster.height, raster.width)
        size = jpeg_size(data)
        if size is not None:
            check_size(size, self._size)
            return data, size
        pixels = decode(data, self._channels)
        check_size(pixels.shape[1:], self._size)
        return pixels, (pixels.shape[1], pixels.shape[2])

    def _decode(self, opened: bytes | np.ndarray | Raster) -> np.ndarray:
        if isinstance(opened, bytes):
            return decode(opened, self._channels)
        return opened.pixels() if isinstance(opened, Raster) else opened


class MemorySource(_IndexedSource):
    """Gathers from one array of equal-size images, decoded once (for small images).

    The array is a file beside the index. It is mapped into memory, so all ranks and
    workers of a node share one copy.
    """

    in_memory = True

    def __init__(self, index: ShardIndex, *, channels: int, augment: Augment) -> None:
        """Decodes all samples of `index` into a file, unless the file exists."""
        super().__init__(index, channels=channels, augment=augment)
        self.path = decoded_array(index, channels, index.dataset.bands)
        self._array: np.ndarray | None = None

    def images(
        self,
        seed: int,
        epoch: int,
        samples: np.ndarray,
        views: np.ndarray | None = None,
        out: np.ndarray | None = None,
    ) -> np.ndarray:
        """Computes augmented images: (B, C, H, W), see `Source`."""
        if self._array is None:
            self._array = np.load(self.path, mmap_mode="r")
        images = self._array[samples]
        self._decode_black(samples, images)
        sizes = np.broadcast_to(np.array(images.shape[2:], np.int64), (len(samples), 2))
        drawn = self._augment.draw(seed, epoch, samples if views is None else views, sizes)
        augmented = self._augment.apply_batch(images, drawn)
        if out is None:
            return augmented
        out[:] = augmented
        return out

    def _decode_black(self, samples: np.ndarray, images: np.ndarray) -> None:
        """Decodes black images again: damaged ones raise; others are really black, or have been repaired."""
        # Check the first row before the whole image: it costs less than 1 % of cropping, and few are black there.
        black = np.flatnonzero(~images[:, :, 0].any(axis=(1, 2)))
        damaged = []
        for place in black[~images[black].any(axis=(1, 2, 3))].tolist():
            sample = int(samples[place])
            try:
                images[place] = decode_sample(self._index, sample, self._channels, self._bands)
            except (ReadError, DecodeError) as error:
                damaged.append((place, self._index.damage(sample, str(error))))
        if damaged:
            raise DamagedSample(damaged, self._index.folder)

    def __getstate__(self) -> dict[str, object]:
        # Pickle would send the memory map to workers as a copy of the data. They map the file again.
        return {**self.__dict__, "_array": None}


def open_source(
    index: ShardIndex,
    name: Literal["auto", "memory", "tar"],
    *,
    channels: int,
    augment: Augment,
    memory_limit_gib: float,
    say: bool = False,
) -> Source:
    """Opens a source. "auto" takes "memory" if all images have one size and fit into `memory_limit_gib`.

    With `say` this process warns of pixels that were decoded from earlier shards.

    Raises:
        InputError: if "memory" is asked for and the images differ in size or do not fit, or for a policy that does not
            go with the images' bands.
    """
    _check_policy(augment, index.dataset.bands)
    gib = array_bytes(index, channels, index.dataset.bands) / 2**30
    if name == "auto":
        name = "memory" if index.one_size is not None and gib <= memory_limit_gib else "tar"
    if name == "tar":
        return TarSource(index, channels=channels, augment=augment)
    if index.one_size is None:
        raise InputError('data.source="memory" needs images of one size; this split has several: use "tar"')
    if gib > memory_limit_gib:
        raise InputError(
            f'data.source="memory" needs {gib:.1f} GiB, over data.memory_limit_gib={memory_limit_gib}: '
            'raise the limit or use "tar"'
        )
    source = MemorySource(index, channels=channels, augment=augment)
    if say:
        warn_of_changes(index, source.path)
    return source


def _check_policy(augment: Augment, bands: Bands | None) -> None:
    """Refuses policies that change colors, for images that have none."""
    if augment.policy is None or bands is None or (bands.eight_bit and len(bands.names) in (1, 3)):
        return
    raise InputError(
        f'data.augment.policy="{augment.policy.name}" changes colors of 8-bit gray or RGB; the images have '
        f"{len(bands.names)} bands of {bands.dtype}: data.augment.policy=none (crop, flip and erasing work)"
    )
