"""The rows of an index: where the samples of a shard lie, also of a damaged one."""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from mae_vit.core.errors import InputError
from mae_vit.core.messages import count_of, error_reason
from mae_vit.data.shards.dataset_json import Shard
from mae_vit.data.shards.samples import Sample, class_number, read_groups, read_samples
from mae_vit.data.shards.tar_headers import BLOCK, DamagedTar

# Of a sample that is not there, offset is -1 and length 0; of an image of no bytes, length alone is 0.
ROW = np.dtype([("offset", "<i8"), ("length", "<i4"), ("shard", "<i4"), ("label", "<i4"), ("key", "<u4")])
_ROW = struct.Struct("<qiiiI")
_SMALL_INDEX = 1 << 26
NO_LABEL = -1
# Of a sample that is not there, and was not when the split was first read.
UNKNOWN_LABEL = -2


def key_check(key: str) -> int:
    """Returns the CRC-32 of a key: enough to tell the samples of a shard apart."""
    return zlib.crc32(key.encode("utf-8", "surrogateescape"))


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


class RowFile:
    """Rows of an index file, one by one.

    Those of a large index are read, not mapped: to touch a mapped row here and there maps up to 2 MB of
    the file for each, which counts as the process's memory.
    """

    def __init__(self, path: Path) -> None:
        """Opens an index file."""
        # As a plain array: to take a row of np.memmap's class costs as much as to read a small image.
        mapped = np.load(path, mmap_mode="r")
        self.all = np.asarray(mapped)
        self._start = int(mapped.offset)
        self._file = path.open("rb", buffering=0) if self.all.nbytes > _SMALL_INDEX else None

    def row(self, sample: int) -> tuple[int, int, int, int, int]:
        """A sample's offset, length, shard, label and key check."""
        if self._file is None:
            return self.all.item(sample)
        if not 0 <= sample < len(self.all):
            raise IndexError(f"sample {sample} of {len(self.all)}")
        data = os.pread(self._file.fileno(), _ROW.size, self._start + sample * _ROW.size)
        return _ROW.unpack(data)

    def labels(self, samples: np.ndarray) -> np.ndarray:
        """int32 (B,): of samples (B,)."""
        if self._file is None:
            return np.asarray(self.all["label"][samples])
        return np.array([self.row(sample)[3] for sample in samples.tolist()], np.int32)


@dataclass(frozen=True)
class ShardState:
    """What tells a file from another of its name; None where there is none."""

    bytes: int | None
    mtime_ns: int | None


def state_of(path: Path) -> ShardState:
    """Looks at a shard from outside."""
    try:
        status = path.stat()
    except OSError:
        return ShardState(None, None)
    return ShardState(status.st_size, status.st_mtime_ns)


@dataclass
class ShardRows:
    """What there is of the samples that a shard should hold.

    Attributes:
        rows: structured (n,), one for each sample that is described.
        state: of the file that they are from.
        problem: why it is not the shard that is described, as a predicate ("is missing");
            empty if it is.
        damaged: key (None if unknown) and reason of samples by their place in the shard;
            those that are not there and not named share the shard's problem.
    """

    rows: np.ndarray
    state: ShardState
    problem: str = ""
    damaged: dict[int, tuple[str | None, str]] = field(default_factory=dict)


def read_rows(path: Path, number: int, described: Shard, known: np.ndarray | None) -> ShardRows:
    """Finds the samples that a shard should hold; each keeps the place that it has in the whole shard.

    Args:
        path: of the shard.
        number: of the shard, for the rows.
        described: what it should hold.
        known: its rows from when it was whole, None if it was never seen whole. By these
            each sample is found wherever it lies; without them places are counted, and a
            tar that lacks samples in its midst without a trace gives none.

    Raises:
        InputError: if it holds more samples than it should.
    """
    state = state_of(path)
    found, broken = _read_all(path)
    images = [sample for sample in found if sample.extension]
    if len(images) > described.samples:
        raise InputError(
            f"shard {path.name} holds {len(images)} samples, dataset.json says {described.samples}"
        )
    read = ShardRows(_lost_rows(number, described, known), state)
    places = _places(found, described.samples, broken) if known is None else _places_by_key(found, known)
    for place, sample in enumerate(places):
        if sample is None:
            continue
        _fill(read, place, sample, path, known is not None)
        if broken and sample is found[-1] and not sample.extension:
            # The tar ends within it.
            read.damaged[place] = (sample.key, f"the shard {broken}")
    lost = int((read.rows["length"] == 0).sum())
    if broken:
        read.problem = broken
    elif state.bytes != described.bytes:
        read.problem = f"has {state.bytes} bytes, dataset.json says {described.bytes}"
    elif len(images) != described.samples and len(read.damaged) < lost:
        read.problem = f"holds {len(images)} samples, dataset.json says {described.samples}"
    elif lost:
        read.problem = f"holds {count_of(lost, 'damaged sample')}"
    return read


def _read_all(path: Path) -> tuple[list[Sample], str]:
    """The samples of a shard up to where it is damaged, those without an image too; and the damage."""
    found: list[Sample] = []
    try:
        for sample in read_groups(path):
            found.append(sample)
    except FileNotFoundError:
        return found, "is missing"
    except DamagedTar as error:
        return found, f"is damaged: {str(error).removeprefix(f'{path}: ')}"
    except OSError as error:
        return found, f"cannot be read: {error_reason(error)}"
    return found, ""


def _lost_rows(number: int, described: Shard, known: np.ndarray | None) -> np.ndarray:
    """Rows of samples that are not there; of those known before, label and key stay."""
    rows = np.zeros(described.samples, ROW) if known is None else known.copy()
    rows["offset"], rows["length"], rows["shard"] = -1, 0, number
    if known is None:
        rows["label"] = UNKNOWN_LABEL
    return rows


def _places(found: list[Sample], samples: int, broken: str) -> list[Sample | None]:
    """Which of the samples found takes each place."""
    if broken and found and found[-1].label is None and any(sample.label for sample in found):
        found = found[:-1]  # its label was cut off
    images = [sample for sample in found if sample.extension]
    # In shards of others there may be keys without an image that are no samples.
    labeled = [sample for sample in found if sample.extension or sample.label is not None]
    for fitting in (images, labeled, labeled if broken else found):
        if len(fitting) == samples:
            return list(fitting)
    # Of a whole tar that lacks some it cannot be told which.
    return [*(labeled if broken else ()), *[None] * samples][:samples]


def _places_by_key(found: list[Sample], known: np.ndarray) -> list[Sample | None]:
    by_key: dict[int, list[Sample]] = {}
    for sample in reversed(found):
        by_key.setdefault(key_check(sample.key), []).append(sample)
    waiting = (by_key.get(key) for key in known["key"].tolist())
    return [samples.pop() if samples else None for samples in waiting]


def _fill(read: ShardRows, place: int, sample: Sample, path: Path, known: bool) -> None:
    """Enters a sample that was found, or what is wrong with it."""
    row = read.rows[place]
    row["key"] = key_check(sample.key)
    if sample.label is not None or not known:
        try:
            row["label"] = class_number(path, sample)
        except DamagedTar:
            read.damaged[place] = (sample.key, f"its .cls is no class number: {(sample.label or b'')[:32]!r}")
            return
    if not sample.extension:
        read.damaged[place] = (sample.key, "no image is there")
        return
    row["offset"], row["length"] = sample.offset, sample.length
    if not sample.length:
        read.damaged[place] = (sample.key, "no bytes")
