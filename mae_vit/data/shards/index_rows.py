"""The rows of an index: where the samples of a split lie in its shards."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from mae_vit.data.shards.dataset_json import Shard
from mae_vit.data.shards.samples import class_number, read_samples
from mae_vit.data.shards.tar_headers import BLOCK

ROW = np.dtype([("offset", "<i8"), ("length", "<i4"), ("shard", "<i4"), ("label", "<i4"), ("key", "<u4")])
NO_LABEL = -1


def key_check(key: str) -> int:
    """Returns the CRC-32 of a key: enough to tell the samples of a shard apart."""
    return zlib.crc32(key.encode("utf-8", "surrogateescape"))


def plain_key_fits(header: bytes, check: int) -> bool:
    """Whether the name in a member's header has a key of this check; each read of an image asks."""
    name = header[:100].partition(b"\0")[0]
    return zlib.crc32(name[: name.find(b".", name.rfind(b"/") + 1)]) == check


def index_shard(path: Path, shard: int) -> np.ndarray:
    """Lists the samples of one shard: structured (n,), in the order of their images.

    Raises:
        DamagedTar: if the tar is damaged or holds an image twice under a key.
        OSError: if it cannot be read.
    """
    rows = [
        (sample.offset, sample.length, shard, class_number(path, sample), key_check(sample.key))
        for sample in read_samples(path)
    ]
    return np.array(rows, ROW)


def rows_fit(rows: np.ndarray, shards: Sequence[Shard], classes: int) -> bool:
    """Whether rows are of whole shards: as many samples in each as described, all within it, of known classes."""
    counts = np.array([shard.samples for shard in shards])
    if not np.array_equal(rows["shard"], np.repeat(np.arange(len(shards)), counts)):
        return False
    ends = np.repeat(np.array([shard.bytes for shard in shards]), counts)
    offset, length = rows["offset"], rows["length"].astype(np.int64)
    labeled = (rows["label"] >= NO_LABEL) & (rows["label"] < classes)
    return bool(((offset >= BLOCK) & (length > 0) & (offset <= ends - length) & labeled).all())


def load_rows(path: Path, samples: int | None = None) -> np.ndarray | None:
    """Maps an index; None unless it is an array of rows, of `samples` if that is given.

    A crash of the machine may leave an empty file.
    """
    try:
        rows = np.load(path, mmap_mode="r")
    except (OSError, EOFError, ValueError):
        return None
    # An archive of arrays opens as something else.
    if not isinstance(rows, np.ndarray) or rows.dtype != ROW or rows.ndim != 1:
        return None
    return rows if samples in (None, len(rows)) else None
