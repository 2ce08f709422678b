"""Sources of augmented batches: `tar` decodes on demand, `memory` once for all.

Both give the same pixels for the same (seed, epoch, sample index).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
from tqdm import tqdm

from mae_vit.data.augment import Augment
from mae_vit.data.decode import DecodeError, decode
from mae_vit.data.index import ShardIndex
from mae_vit.errors import DamagedSample, InputError

SourceName = Literal["memory", "tar"]


class Source(Protocol):
    """Where batches come from."""

    @property
    def labels(self) -> np.ndarray:
        """Int (N,), -1 where there is none."""

    def images(self, seed: int, epoch: int, index: np.ndarray) -> np.ndarray:
        """Returns augmented images of samples `index` (B,): uint8 (B, C, H, W)."""


def decode_sample(index: ShardIndex, sample: int, channels: int) -> np.ndarray:
    """Reads and decodes one sample: uint8 (C, H, W).

    Raises:
        DamagedSample: naming shard, key and offset.
    """
    try:
        return decode(index.read(sample), channels)
    except DecodeError as error:
        raise DamagedSample(
            f"cannot decode {index.describe(sample)}: {error}: `mae-vit check {index.folder}` lists all such"
        ) from None


class TarSource:
    """Reads, decodes and crops each sample when it is asked for (large images)."""

    def __init__(self, index: ShardIndex, *, channels: int, augment: Augment) -> None:
        """Reads the samples of `index` in `channels` channels."""
        self._index = index
        self._channels = channels
        self._augment = augment

    @property
    def labels(self) -> np.ndarray:
        """Int (N,), -1 where there is none."""
        return self._index.labels

    def images(self, seed: int, epoch: int, index: np.ndarray) -> np.ndarray:
        """Returns augmented images of samples `index` (B,): uint8 (B, C, H, W)."""
        decoded = [decode_sample(self._index, int(sample), self._channels) for sample in index]
        sizes = np.array([image.shape[1:] for image in decoded], np.int64)
        view = self._augment.draw(seed, epoch, index, sizes)
        return self._augment.apply(decoded, view)


class MemorySource:
    """Gathers from one uint8 array of equal-size images, decoded once (small images).

    The array is a file beside the index, mapped into memory, so that all ranks and
    workers of a node share one copy.
    """

    def __init__(self, index: ShardIndex, *, channels: int, augment: Augment) -> None:
        """Decodes all samples of `index` on first use."""
        self._index = index
        self._channels = channels
        self._augment = augment
        self._path = _decoded_array(index, channels)
        self._array: np.ndarray | None = None

    @property
    def labels(self) -> np.ndarray:
        """Int (N,), -1 where there is none."""
        return self._index.labels

    def images(self, seed: int, epoch: int, index: np.ndarray) -> np.ndarray:
        """Returns augmented images of samples `index` (B,): uint8 (B, C, H, W)."""
        if self._array is None:
            self._array = np.load(self._path, mmap_mode="r")
        images = self._array[index]
        sizes = np.broadcast_to(np.array(images.shape[2:], np.int64), (len(index), 2))
        return self._augment.apply_batch(images, self._augment.draw(seed, epoch, index, sizes))

    def __getstate__(self) -> dict[str, object]:
        # A memory map would travel to workers as a copy of the data.
        return {**self.__dict__, "_array": None}


def open_source(
    index: ShardIndex,
    name: Literal["auto", "memory", "tar"],
    *,
    channels: int,
    augment: Augment,
    memory_limit_gib: float,
) -> Source:
    """Opens a source; "auto" takes memory where all images have one size and fit.

    Raises:
        InputError: if "memory" is asked for and cannot be.
    """
    gib = _array_bytes(index, channels) / 2**30
    sizes = _one_size(index)
    if name == "auto":
        name = "memory" if sizes is not None and gib <= memory_limit_gib else "tar"
    if name == "tar":
        return TarSource(index, channels=channels, augment=augment)
    if sizes is None:
        raise InputError('data.source="memory" needs images of one size; this split has several: use "tar"')
    if gib > memory_limit_gib:
        raise InputError(
            f'data.source="memory" needs {gib:.1f} GiB, over data.memory_limit_gib={memory_limit_gib}: '
            'raise the limit or use "tar"'
        )
    return MemorySource(index, channels=channels, augment=augment)


def _one_size(index: ShardIndex) -> tuple[int, int] | None:
    """The (height, width) of all images of the split, or None where they differ."""
    split = index.split_info
    if split.height[0] != split.height[1] or split.width[0] != split.width[1]:
        return None
    return split.height[0], split.width[0]


def _array_bytes(index: ShardIndex, channels: int) -> int:
    split = index.split_info
    return len(index) * channels * split.height[1] * split.width[1]


def _decoded_array(index: ShardIndex, channels: int) -> Path:
    """Returns the file of all images decoded, uint8 (N, C, H, W); makes it if need be."""
    path = index.cache_path(f"u8-{channels}.npy")
    size = _one_size(index)
    assert size is not None
    shape = (len(index), channels, *size)
    with index.locked():
        if not (path.exists() and np.load(path, mmap_mode="r").shape == shape):
            _decode_all(index, channels, shape, path)
    return path


def _decode_all(index: ShardIndex, channels: int, shape: tuple[int, ...], path: Path) -> None:
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        array = np.lib.format.open_memmap(partial, mode="w+", dtype=np.uint8, shape=shape)
        for sample in tqdm(range(len(index)), desc="decoding", unit=" images", delay=2, leave=False):
            array[sample] = decode_sample(index, sample, channels)
        array.flush()
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
