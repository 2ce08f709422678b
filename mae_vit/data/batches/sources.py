"""Sources of samples: `TarSource` decodes on demand, `MemorySource` all images once. Both give the same pixels."""

from __future__ import annotations

import math
import os
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mae_vit.core.arrays import create_array
from mae_vit.core.errors import DamagedSample, InputError
from mae_vit.core.files import replacing
from mae_vit.core.messages import error_reason
from mae_vit.core.progress import progress
from mae_vit.data.images.decode import DecodeError, decode, decode_mask, id_table, numbered
from mae_vit.data.index import ShardIndex, TarIndex
from mae_vit.data.shards.index_files import load_array
from mae_vit.data.shards.samples import find_masks
from mae_vit.data.shards.shard_files import ReadError
from mae_vit.data.shards.tar_headers import DamagedTar

# Times of files on exFAT are even seconds.
_TIMES_NS = 2 * 10**9


class StoredMasks:
    """Reads the masks of a split."""

    def __init__(self, index: ShardIndex) -> None:
        """Finds the masks in the shards.

        Raises:
            InputError: if the split has no masks, or an image has none.
        """
        dataset = index.dataset
        if not isinstance(index, TarIndex) or index.split_info.masks is None or dataset.segmentation is None:
            raise InputError(
                f'split "{index.split}" of {index.folder} has no masks; add them with `mae-vit prepare SRC OUT '
                "--masks DIR --mask-classes FILE`"
            )
        self._index = index
        self._table = id_table(dataset.segmentation.ids, dataset.segmentation.ignore)
        self._places = _mask_places(index)

    def read(self, sample: int) -> np.ndarray:
        """Reads a mask, uint16 (H, W): class + 1 of each pixel; 0 for pixels that do not count.

        Raises:
            DecodeError: if it cannot be read.
        """
        try:
            data = self._index.read_at(sample, *self._places[sample].tolist())
            return numbered(decode_mask(data), self._table)
        except (ReadError, DecodeError) as error:
            raise DecodeError(f"mask: {error}") from None


def _mask_places(index: TarIndex) -> np.ndarray:
    """Returns offset and length of each sample's mask in its shard, int64 (N, 2); caches them in a file."""
    path = index.cache_path("masks.npy")
    if (stored := load_array(path, np.dtype(np.int64), (len(index), 2))) is not None:
        return np.asarray(stored)
    keys, places = index.keys(), list[tuple[int, int]]()
    with index.locked():
        for number, shard in enumerate(index.split_info.shards):
            try:
                masks = find_masks(index.fetch(number))
                places += [masks[key] for key in keys[len(places) : len(places) + shard.samples]]
            except KeyError as error:
                raise InputError(
                    f"shard {shard.file} of {index.folder} has no mask for {error}; prepare the data again"
                ) from None
            except (ReadError, DamagedTar, OSError) as error:
                raise InputError(
                    f"cannot read the masks in shard {shard.file} of {index.folder}: {error}"
                ) from None
        found = np.array(places, np.int64)
        with replacing(path) as partial, partial.open("wb") as file:
            np.save(file, found)
    return found


class Sample(NamedTuple):
    """One sample of a data set, decoded.

    Attributes:
        pixels: (C, H, W), uint8 or raw values of bands.
        label: its class; -1 without one.
        mask: uint16 (H, W), class + 1 of each pixel, 0 where it does not count; None without masks.
    """

    pixels: np.ndarray
    label: int = -1
    mask: np.ndarray | None = None


class TarSource:
    """Reads and decodes each sample of a split on demand (for large images). Data workers get a pickled copy.

    Attributes:
        channels: C of all samples.
        dtype: type of the pixels: uint8 for photographs, else that of the bands.
        has_masks: whether samples have a mask.
    """

    def __init__(self, index: ShardIndex, *, channels: int, masks: StoredMasks | None = None) -> None:
        """Reads the samples of `index` in 1 channel for gray, 3 for RGB, or as many as there are bands."""
        self.index, self.channels, self.masks = index, channels, masks
        self.dtype, self.has_masks = np.dtype(index.bands.dtype), masks is not None

    @property
    def labels(self) -> np.ndarray:
        """Int (N,), -1 where there is none."""
        return self.index.labels

    def read(self, sample: int) -> Sample:
        """Reads and decodes a sample; raises DamagedSample if it cannot be read."""
        try:
            pixels = self._pixels(sample)
            mask = None if self.masks is None else self.masks.read(sample)
        except (ReadError, DecodeError) as error:
            damage = self.index.damage(sample, str(error))
            raise DamagedSample([(0, damage)], self.index.folder) from None
        return Sample(pixels, int(self.index.labels[sample]), mask)

    def _pixels(self, sample: int) -> np.ndarray:
        return decode_sample(self.index, sample, self.channels)


class MemorySource(TarSource):
    """Reads from one array of equal-size images, decoded once (for small images).

    The array is a memory-mapped file beside the index, so all ranks and workers of a node share one copy.

    Attributes:
        path: file of the array.
        image_shape: (C, H, W) of all images.
    """

    def __init__(self, index: ShardIndex, *, channels: int, masks: StoredMasks | None = None) -> None:
        """Decodes all samples of `index` into a file, unless the file exists."""
        super().__init__(index, channels=channels, masks=masks)
        assert index.one_size is not None
        self.image_shape = (channels, *index.one_size)
        self.path = _decoded_array(index, (len(index), *self.image_shape))
        self._array: np.ndarray | None = None

    def gather(self, samples: np.ndarray) -> np.ndarray:
        """Returns the pixels of samples (B,): (B, C, H, W).

        Raises:
            DamagedSample: if samples cannot be read; names all of them.
        """
        if self._array is None:
            self._array = np.load(self.path, mmap_mode="r")
        images: np.ndarray = self._array[samples]
        damaged = []
        # Damaged images are stored black. A black image may also be genuine, or repaired by now. Check the first row
        # before the whole image: it costs less than 1 % of cropping, and few images are black there.
        black = np.flatnonzero(~images[:, :, 0].any(axis=(1, 2)))
        for place in black[~images[black].any(axis=(1, 2, 3))].tolist():
            sample = int(samples[place])
            try:
                images[place] = super()._pixels(sample)
            except (ReadError, DecodeError) as error:
                damaged.append((place, self.index.damage(sample, str(error))))
        if damaged:
            raise DamagedSample(damaged, self.index.folder)
        return images

    def _pixels(self, sample: int) -> np.ndarray:
        return self.gather(np.array([sample]))[0]

    def __getstate__(self) -> dict[str, object]:
        # Pickle would send workers a copy of the mapped data. They map the file again.
        return {**self.__dict__, "_array": None}


def decode_sample(index: ShardIndex, sample: int, channels: int) -> np.ndarray:
    """Reads and decodes one sample: raw values (C, H, W).

    Raises:
        ReadError: if its bytes cannot be read.
        DecodeError: if they are not a complete image, or if its size differs in a split of equal-size images.
    """
    image, expected = decode(index.read(sample), channels, bands=index.bands), index.one_size
    # `crop="pad"` and `MemorySource` rely on equal sizes.
    if expected is not None and image.shape[1:] != expected:
        _, height, width = image.shape
        raise DecodeError(f"{width}x{height} px, where all images are {expected[1]}x{expected[0]}")
    return image


def _decoded_array(index: ShardIndex, shape: tuple[int, ...]) -> Path:
    """Returns the file of all decoded images, (N, C, H, W), damaged ones black.

    Writes it if it is missing, cut, or older than a shard.
    """
    kind, channels = np.dtype(index.bands.dtype), shape[1]
    path = index.cache_path(f"{kind.name}-{channels}.npy")
    with index.locked():
        written = _written(index)
        if not path.exists() and index.missing_samples()[1]:
            # Another name, so that all images are decoded again once the shards are whole.
            path = path.with_name(f"{path.stem}-partial.npy")
        if load_array(path, kind, shape) is None or path.stat().st_mtime_ns < written:
            index.drop_stale()
            shown = progress(range(len(index)), desc="decoding", unit=" images", delay=2, leave=False)
            try:
                with replacing(path) as partial:
                    array = create_array(partial, kind, shape)
                    for sample in shown:
                        with suppress(ReadError, DecodeError):  # a damaged image stays black
                            array[sample] = decode_sample(index, sample, channels)
                    array.flush()
                if written:  # a shard's clock may be ahead
                    os.utime(path, ns=(written, written))
            except OSError as error:
                mib = math.prod(shape) * kind.itemsize / 2**20
                raise InputError(
                    f"{path.parent} has no room for the decoded images ({mib:,.0f} MiB, {error_reason(error)}); "
                    "make room, or use data.source=tar"
                ) from None
    return path


def _written(index: ShardIndex) -> int:
    """Returns when the newest shard was written, in ns; 0 for remote shards, or if one is missing.

    It is rounded up to a time that every file system stores.
    """
    with suppress(OSError):
        shards = () if index.remote else index.split_info.shards
        newest = max(((index.folder / shard.file).stat().st_mtime_ns for shard in shards), default=0)
        return -(-newest // _TIMES_NS) * _TIMES_NS
    return 0
