"""Decodes samples: one, or all of a split into an array."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path

import numpy as np

from mae_vit.core.arrays import create_array
from mae_vit.core.bands import Bands
from mae_vit.core.errors import InputError
from mae_vit.core.files import replacing
from mae_vit.core.messages import count_of, error_reason
from mae_vit.core.progress import progress
from mae_vit.data.images.decode import DecodeError, decode
from mae_vit.data.index import ShardIndex
from mae_vit.data.shards.shard_files import ReadError


def dtype_of(bands: Bands | None) -> np.dtype:
    """Returns the type of decoded values: uint8 for photographs, else that of the bands."""
    return np.dtype("uint8" if bands is None else bands.dtype)


def decode_sample(index: ShardIndex, sample: int, channels: int, bands: Bands | None = None) -> np.ndarray:
    """Reads and decodes one sample: (C, H, W), uint8 or raw values of the data set's bands.

    Raises:
        ReadError: if its bytes cannot be read.
        DecodeError: if they are no complete image, or if its size differs in a split of equal-size images.
    """
    image, expected = decode(index.read(sample), channels, bands=bands), index.one_size
    # `crop="pad"` and `MemorySource` rely on equal sizes.
    if expected is not None and image.shape[1:] != expected:
        _, height, width = image.shape
        raise DecodeError(f"{width}x{height} px, where all images are {expected[1]}x{expected[0]}")
    return image


def array_bytes(index: ShardIndex, channels: int) -> int:
    """Returns the size of all images of a split, decoded."""
    split = index.split_info
    itemsize = dtype_of(index.dataset.bands).itemsize
    return len(index) * channels * split.height[1] * split.width[1] * itemsize


def decoded_array(index: ShardIndex, channels: int) -> Path:
    """Returns the file of all images, (N, C, H, W), damaged ones black; writes it if it is missing."""
    kind = dtype_of(index.dataset.bands)
    path, size = index.cache_path(f"{kind.name}-{channels}.npy"), index.one_size
    assert size is not None
    shape = (len(index), channels, *size)
    with index.locked():
        if not path.exists() and index.misfit_shards():
            # By another name: once the shards are whole again, all images are decoded.
            path = path.with_name(f"{path.stem}-partial.npy")
        if not _is_whole(path, kind, shape):
            index.drop_stale()
            try:
                with replacing(path) as partial:
                    array = create_array(partial, kind, shape)
                    _decode_all(index, channels, array)
                    array.flush()
            except OSError as error:
                mib = array_bytes(index, channels) / 2**20
                raise InputError(
                    f"{path.parent} cannot keep the decoded images, {mib:,.0f} MiB: {error_reason(error)}: make room "
                    "there, or data.source=tar decodes them in each epoch"
                ) from None
    return path


def warn_of_changes(index: ShardIndex, array: Path) -> None:
    """Says which shards were written after their images were decoded into `array`."""
    made, changed = array.stat().st_mtime_ns, list[str]()
    for shard in () if index.remote else index.split_info.shards:
        with suppress(OSError):  # one that is missing is named elsewhere
            if (index.folder / shard.file).stat().st_mtime_ns > made:
                changed.append(shard.file)
    if changed:
        print(
            f"warning: {count_of(len(changed), 'shard')} of {index.folder} may have changed ({changed[0]}), and this "
            f"run takes the pixels of before: see `mae-vit check {index.folder}`, or delete {array} to decode them "
            "again",
            file=sys.stderr,
        )


def _is_whole(path: Path, kind: np.dtype, shape: tuple[int, ...]) -> bool:
    """Whether the array is there; a copy that was cut short is made again."""
    try:
        array = np.load(path, mmap_mode="r")
    except (OSError, ValueError, EOFError):
        return False
    return bool(array.shape == shape and array.dtype == kind)


def _decode_all(index: ShardIndex, channels: int, array: np.ndarray) -> None:
    for sample in progress(range(len(index)), desc="decoding", unit=" images", delay=2, leave=False):
        with suppress(ReadError, DecodeError):  # a damaged image stays black
            array[sample] = decode_sample(index, sample, channels, index.dataset.bands)
