"""The files of an index: the array of rows beside the shards, and the folder of files derived from them."""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from mae_vit.core.errors import InputError
from mae_vit.core.files import user_cache
from mae_vit.core.messages import error_reason
from mae_vit.data.shards.dataset_json import Shard, Split, file_digest
from mae_vit.data.shards.samples import ShardImage, class_number, read_samples
from mae_vit.data.shards.tar_headers import BLOCK

ROW = np.dtype([("offset", "<i8"), ("length", "<i4"), ("shard", "<i4"), ("label", "<i4"), ("key", "<u4")])
NO_LABEL = -1


def index_hint(folder: Path) -> str:
    """Returns how to write a folder's index again."""
    owner = "" if os.access(folder, os.W_OK) else " (as its owner, since you cannot write there)"
    return f"run `mae-vit prepare --in-place {folder} --overwrite`{owner}"


def index_problem(path: Path, info: Split, classes: int, *, compare: bool) -> str | None:
    """Returns what is wrong with an index beside its shards, as a predicate for a message; None if nothing is.

    `compare` also compares its checksum, and each row with its shard.
    """
    assert info.index is not None
    try:
        size = path.stat().st_size
    except OSError as error:
        return f"cannot be read: {error_reason(error)}"
    if size != info.index.bytes:
        return f"has {size} bytes, dataset.json says {info.index.bytes}"
    rows = load_rows(path, info.samples)
    if rows is None:
        return f"does not have {info.samples:,} samples"
    if compare and file_digest(path) != info.index.sha256:
        return "differs from dataset.json in its checksum"
    return None if not compare or rows_fit(rows, info.shards, classes) else "does not match its shards"


def stored_keys(path: Path, count: int) -> list[str] | None:
    """Reads the keys that are stored beside an index; None unless there are `count` of them."""
    with suppress(OSError, ValueError):
        keys = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(keys, list) and len(keys) == count:
            return keys
    return None


def cache_folder(folder: Path) -> Path:
    """Returns `.index/` beside the shards, or a folder in the user's cache if that cannot be written."""
    beside = folder / ".index"
    with suppress(OSError):
        beside.mkdir(exist_ok=True)
        if os.access(beside, os.W_OK):
            return beside
    cache = user_cache() / hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"neither {beside} nor {cache} can be written ({error_reason(error)}), and the index needs one; set "
            "XDG_CACHE_HOME"
        ) from None
    return cache


def fingerprint_of(info: Split) -> str:
    """Returns a hash that changes when any shard of a split changes."""
    text = "\n".join(f"{shard.file} {shard.samples} {shard.bytes} {shard.sha256}" for shard in info.shards)
    return hashlib.sha256(text.encode()).hexdigest()


def key_check(key: str) -> int:
    """Returns the CRC-32 of a key: enough to tell the samples of a shard apart."""
    return zlib.crc32(key.encode("utf-8", "surrogateescape"))


def plain_key_fits(header: bytes, check: int) -> bool:
    """Whether the key of the name in a member's header has this CRC-32. Each read of an image calls it."""
    name = header[:100].partition(b"\0")[0]
    return zlib.crc32(name[: name.find(b".", name.rfind(b"/") + 1)]) == check


def index_shard(path: Path, shard: int, samples: Iterable[ShardImage] | None = None) -> np.ndarray:
    """Lists the samples of one shard, if they are not given: structured (n,), in the order of their images.

    Raises:
        DamagedTar: if the tar is damaged or holds an image twice under a key.
        OSError: if it cannot be read.
    """
    rows = [
        (sample.offset, sample.length, shard, class_number(path, sample), key_check(sample.key))
        for sample in (read_samples(path) if samples is None else samples)
    ]
    return np.array(rows, ROW)


def rows_fit(rows: np.ndarray, shards: Sequence[Shard], classes: int) -> bool:
    """Whether rows fit their shards: as many samples in each as described, all within it, of known classes."""
    counts = np.array([shard.samples for shard in shards])
    if not np.array_equal(rows["shard"], np.repeat(np.arange(len(shards)), counts)):
        return False
    ends = np.repeat(np.array([shard.bytes for shard in shards]), counts)
    offset, length = rows["offset"], rows["length"].astype(np.int64)
    labeled = (rows["label"] >= NO_LABEL) & (rows["label"] < classes)
    return bool(((offset >= BLOCK) & (length > 0) & (offset <= ends - length) & labeled).all())


def load_array(path: Path, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray | None:
    """Maps an array into memory; None if the file is missing, truncated, or another one."""
    try:
        array = np.load(path, mmap_mode="r")
    except (OSError, EOFError, ValueError):  # a crash of the machine may leave an empty file
        return None
    # np.load opens an archive of arrays as another type.
    whole = isinstance(array, np.ndarray) and array.dtype == dtype and array.shape == shape
    return array if whole else None


def load_rows(path: Path, samples: int) -> np.ndarray | None:
    """Maps an index into memory; None if it is no array of so many rows."""
    return load_array(path, ROW, (samples,))
