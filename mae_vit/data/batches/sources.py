"""Sources of augmented batches: `tar` decodes on demand, `memory` once for all.

Both give the same pixels for the same (seed, epoch, sample index).
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, astuple
from pathlib import Path
from typing import Literal, Protocol

import numpy as np

from mae_vit.core.errors import Damage, DamagedSample, InputError
from mae_vit.core.files import replacing
from mae_vit.core.progress import progress
from mae_vit.data.images.augment import Augment
from mae_vit.data.images.decode import DecodeError, decode, jpeg_size
from mae_vit.data.index import ShardIndex
from mae_vit.data.order.order import view_keys
from mae_vit.data.shards.index_rows import state_of
from mae_vit.data.shards.shard_files import ReadError


class Source(Protocol):
    """Where batches come from."""

    @property
    def labels(self) -> np.ndarray:
        """Int (N,), -1 where there is none."""

    def labels_of(self, index: np.ndarray) -> np.ndarray:
        """Int (B,), the labels of samples `index` (B,), without a look at all."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """(C, H, W) of the augmented images."""

    def images(
        self,
        seed: int,
        epoch: int,
        index: np.ndarray,
        out: np.ndarray | None = None,
        *,
        repeats: int = 1,
    ) -> np.ndarray:
        """Computes augmented images of samples `index` (B,).

        Args:
            seed: the run's seed.
            epoch: of these samples.
            index: sample numbers (B,).
            out: uint8 (B, C, H, W) memory to put them into; new memory if None.
            repeats: how often in a row each sample comes, in another view each time.

        Returns:
            uint8 (B, C, H, W): `out`, where that is given.

        Raises:
            DamagedSample: naming all of them that cannot be read.
        """


def decode_sample(index: ShardIndex, sample: int, channels: int) -> np.ndarray:
    """Reads and decodes one sample: uint8 (C, H, W).

    Raises:
        ReadError: if its bytes are not there.
        DecodeError: if they are no whole image, or none of the size that all images have.
    """
    image = decode(index.read(sample), channels)
    _check_size(image.shape[1:], index.one_size)
    return image


def _check_size(found: tuple[int, ...], expected: tuple[int, ...] | None) -> None:
    """Refuses an image of another size than all are: crops by a shift, and arrays, have no use for it."""
    if expected is not None and found != expected:
        raise DecodeError(f"{found[1]}x{found[0]} px, where all images are {expected[1]}x{expected[0]}")


class _IndexedSource:
    """What sources of the samples of one index share."""

    def __init__(self, index: ShardIndex, *, channels: int, augment: Augment) -> None:
        """Reads the samples of `index` in `channels` channels."""
        self._index = index
        self._channels = channels
        self._augment = augment

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


class TarSource(_IndexedSource):
    """Reads, decodes and crops each sample when it is asked for (large images)."""

    def __init__(self, index: ShardIndex, *, channels: int, augment: Augment) -> None:
        """Reads the samples of `index` in `channels` channels."""
        super().__init__(index, channels=channels, augment=augment)
        self._size = index.one_size

    def images(
        self,
        seed: int,
        epoch: int,
        index: np.ndarray,
        out: np.ndarray | None = None,
        *,
        repeats: int = 1,
    ) -> np.ndarray:
        """Computes augmented images of samples `index` (B,): uint8 (B, C, H, W), see `Source`."""
        damaged: dict[int, str] = {}
        opened = []
        once = index[::repeats]
        for place, sample in enumerate(once.tolist()):
            try:
                opened.append(self._open(sample))
            except (ReadError, DecodeError) as error:
                damaged[place] = str(error)
                opened.append((b"", self._augment.img_size))
        sizes = np.repeat(np.array([size for _, size in opened], np.int64), repeats, axis=0)
        view = self._augment.draw(seed, epoch, view_keys(index, repeats), sizes)
        out = np.empty((len(index), *self.shape), np.uint8) if out is None else out
        # Each is decoded into the memory that the one before has left, which is in the
        # cache: to decode all and then cut takes a fifth longer.
        for place, (image, size) in enumerate(opened):
            if place in damaged:
                continue
            try:
                pixels = image if isinstance(image, np.ndarray) else decode(image, self._channels)
                _check_size(pixels.shape[1:], size)
            except DecodeError as error:
                damaged[place] = str(error)
                continue
            for position in range(place * repeats, (place + 1) * repeats):
                out[position] = self._augment.crop_resize_flip(
                    pixels, view.boxes[position], view.flips[position]
                )
        if damaged:
            found = [(place, self._index.damage(int(once[place]), why)) for place, why in damaged.items()]
            raise DamagedSample(
                sorted((place * repeats + k, damage) for place, damage in found for k in range(repeats)),
                self._index.folder,
            )
        self._augment.apply_policy_and_erasing(out, view)
        return out

    def _open(self, sample: int) -> tuple[bytes | np.ndarray, tuple[int, int]]:
        """Reads a sample and finds out its (height, width), as boxes are drawn for a batch at once.

        Where that takes decoding, the pixels are kept.
        """
        data = self._index.read(sample)
        size = jpeg_size(data)
        if size is not None:
            _check_size(size, self._size)
            return data, size
        pixels = decode(data, self._channels)
        _check_size(pixels.shape[1:], self._size)
        return pixels, (pixels.shape[1], pixels.shape[2])


class MemorySource(_IndexedSource):
    """Gathers from one uint8 array of equal-size images, decoded once (small images).

    The array is a file beside the index, mapped into memory, so that all ranks and
    workers of a node share one copy.
    """

    def __init__(self, index: ShardIndex, *, channels: int, augment: Augment) -> None:
        """Decodes all samples of `index` on first use."""
        super().__init__(index, channels=channels, augment=augment)
        self._path, self._damaged = _decoded_array(index, channels)
        self._array: np.ndarray | None = None

    def images(
        self,
        seed: int,
        epoch: int,
        index: np.ndarray,
        out: np.ndarray | None = None,
        *,
        repeats: int = 1,
    ) -> np.ndarray:
        """Computes augmented images of samples `index` (B,): uint8 (B, C, H, W), see `Source`."""
        if self._damaged:
            found = [(n, self._damaged[s]) for n, s in enumerate(index.tolist()) if s in self._damaged]
            if found:
                raise DamagedSample(found, self._index.folder)
        if self._array is None:
            self._array = np.load(self._path, mmap_mode="r")
        images = self._array[index]
        sizes = np.broadcast_to(np.array(images.shape[2:], np.int64), (len(index), 2))
        view = self._augment.draw(seed, epoch, view_keys(index, repeats), sizes)
        views = self._augment.apply_batch(images, view)
        if out is None:
            return views
        out[:] = views
        return out

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
    sizes = index.one_size
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


def _array_bytes(index: ShardIndex, channels: int) -> int:
    split = index.split_info
    return len(index) * channels * split.height[1] * split.width[1]


def _decoded_array(index: ShardIndex, channels: int) -> tuple[Path, dict[int, Damage]]:
    """Finds or makes the file of all images decoded, uint8 (N, C, H, W); and what is damaged, black there."""
    path = index.cache_path(f"u8-{channels}.npy")
    size = index.one_size
    assert size is not None
    shape = (len(index), channels, *size)
    with index.locked():
        damaged = _read_damaged(path, _state_of_shards(index))
        whole = path.exists() and np.load(path, mmap_mode="r").shape == shape
        if not whole or damaged is None or any(_is_mended(index, s, channels) for s in damaged):
            damaged = _decode_all(index, channels, shape, path)
    return path, damaged


def _state_of_shards(index: ShardIndex) -> str:
    """Tells shards from those that were there before, without reading them."""
    if index.remote is not None:
        return "by their checksums"  # as which they are fetched; the array's name holds those
    states = [astuple(state_of(index.folder / shard.file)) for shard in index.split_info.shards]
    return hashlib.sha256(json.dumps(states).encode()).hexdigest()


def _damaged_path(path: Path) -> Path:
    return path.with_name(f"{path.stem}-damaged.json")


def _read_damaged(path: Path, shards: str) -> dict[int, Damage] | None:
    """What could not be decoded when the array was made; None if that is not known, or was of other shards."""
    try:
        told = json.loads(_damaged_path(path).read_text(encoding="utf-8"))
        if told["shards"] != shards:
            return None
        return {damage["sample"]: Damage(**damage) for damage in told["damaged"]}
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _is_mended(index: ShardIndex, sample: int, channels: int) -> bool:
    """Whether a sample that was damaged has been mended."""
    try:
        decode_sample(index, sample, channels)
    except (ReadError, DecodeError):
        return False
    return True


def _decode_all(index: ShardIndex, channels: int, shape: tuple[int, ...], path: Path) -> dict[int, Damage]:
    damaged: dict[int, Damage] = {}
    # Before they are read: of shards that change meanwhile the array is not.
    shards = _state_of_shards(index)
    # The array lasts once its list does.
    _damaged_path(path).unlink(missing_ok=True)
    with replacing(path) as partial:
        array = np.lib.format.open_memmap(partial, mode="w+", dtype=np.uint8, shape=shape)
        for sample in progress(range(len(index)), desc="decoding", unit=" images", delay=2, leave=False):
            try:
                array[sample] = decode_sample(index, sample, channels)
            except (ReadError, DecodeError) as error:
                damaged[sample] = index.damage(sample, str(error))
        array.flush()
    told = {"shards": shards, "damaged": [asdict(damage) for damage in damaged.values()]}
    with replacing(_damaged_path(path)) as partial:
        partial.write_text(json.dumps(told), encoding="utf-8")
    return damaged
