"""Where samples come from: `TarSource` decodes on demand, `MemorySource` decodes all images once.

Both give the same pixels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from mae_vit.core.errors import DamagedSample
from mae_vit.data.batches.decoded import decode_sample, decoded_array, dtype_of
from mae_vit.data.batches.masks import StoredMasks
from mae_vit.data.images.decode import DecodeError
from mae_vit.data.index import ShardIndex
from mae_vit.data.shards.shard_files import ReadError


@dataclass(frozen=True, slots=True)
class Sample:
    """One sample of a data set, decoded.

    Attributes:
        pixels: (C, H, W), uint8 or raw values of bands.
        label: its class; -1 without one.
        mask: uint16 (H, W), class + 1 of each pixel, 0 where it does not count; None without masks.
    """

    pixels: np.ndarray
    label: int = -1
    mask: np.ndarray | None = None


class Source(Protocol):
    """Samples by number, 0..N-1. Processes that load data get a pickled copy."""

    @property
    def channels(self) -> int:
        """C of all samples."""

    @property
    def dtype(self) -> np.dtype:
        """Type of the pixels: uint8 for photographs, else that of the bands."""

    @property
    def labels(self) -> np.ndarray:
        """Int (N,), -1 for a sample without a label."""

    @property
    def has_masks(self) -> bool:
        """Whether samples have a mask."""

    def read(self, sample: int) -> Sample:
        """Reads and decodes a sample.

        Raises:
            DamagedSample: if it cannot be read.
        """


class TarSource:
    """Reads and decodes each sample of a split on demand (for large images).

    Attributes:
        index: of the split.
        channels: 1 for gray, 3 for RGB, or the number of bands.
        bands: what raw values mean; None for 8-bit gray or RGB.
        masks: of the samples; None without.
    """

    def __init__(self, index: ShardIndex, *, channels: int, masks: StoredMasks | None = None) -> None:
        """Reads the samples of `index` in `channels` channels."""
        self.index, self.channels, self.masks = index, channels, masks
        self.bands = index.dataset.bands

    @property
    def dtype(self) -> np.dtype:
        """Type of the pixels."""
        return dtype_of(self.bands)

    @property
    def labels(self) -> np.ndarray:
        """Int (N,), -1 where there is none."""
        return self.index.labels

    @property
    def has_masks(self) -> bool:
        """Whether samples have a mask."""
        return self.masks is not None

    def read(self, sample: int) -> Sample:
        """Reads and decodes a sample, see `Source`."""
        try:
            pixels = self._pixels(sample)
            mask = None if self.masks is None else self.masks.read(sample)
        except (ReadError, DecodeError) as error:
            damage = self.index.damage(sample, str(error))
            raise DamagedSample([(0, damage)], self.index.folder) from None
        return Sample(pixels, self.index.label(sample), mask)

    def _pixels(self, sample: int) -> np.ndarray:
        return decode_sample(self.index, sample, self.channels, self.bands)


class MemorySource(TarSource):
    """Reads from one array of equal-size images, decoded once (for small images).

    The array is a file beside the index. It is mapped into memory, so all ranks and
    workers of a node share one copy.
    """

    def __init__(self, index: ShardIndex, *, channels: int, masks: StoredMasks | None = None) -> None:
        """Decodes all samples of `index` into a file, unless the file exists."""
        super().__init__(index, channels=channels, masks=masks)
        self.path = decoded_array(index, channels)
        self._array: np.ndarray | None = None

    def gather(self, samples: np.ndarray) -> np.ndarray:
        """Returns the pixels of samples (B,): (B, C, H, W).

        Raises:
            DamagedSample: names all that cannot be read.
        """
        if self._array is None:
            self._array = np.load(self.path, mmap_mode="r")
        images: np.ndarray = self._array[samples]
        damaged = []
        # Damaged images are black. Others are really black, or have been repaired. Check the first row before the
        # whole image: it costs less than 1 % of cropping, and few are black there.
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
        # Pickle would send the memory map to workers as a copy of the data. They map the file again.
        return {**self.__dict__, "_array": None}
