"""Writes shards through webdataset's writer, moves them into place and describes them.

A kill leaves a consistent folder.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import webdataset as wds

from mae_vit.core import __version__
from mae_vit.core.arrays import create_array
from mae_vit.core.errors import InputError
from mae_vit.core.files import replacing
from mae_vit.core.progress import progress
from mae_vit.data.prepare.statistics import Statistics
from mae_vit.data.shards.dataset_json import (
    FILE_NAME,
    FORMAT,
    Dataset,
    IndexFile,
    Segmentation,
    Shard,
    Split,
    describe_shard,
    file_digest,
)
from mae_vit.data.shards.index_files import ROW, index_shard
from mae_vit.data.shards.samples import MASK_EXTENSION
from mae_vit.runtime.locks import try_lock

_SHARD_PATTERN = "{split}-[0-9][0-9][0-9][0-9][0-9][0-9].tar"


def excluded_file(split: str) -> str:
    """Returns the name of the file that lists a split's excluded images."""
    return f"{split}-excluded.txt"


def partial_folder(out: Path, split: str) -> Path:
    """Returns the folder of a split's shards until all are written."""
    return out / f".{split}.partial"


def index_path(out: Path, split: str) -> Path:
    """Returns the path of the index beside a split's shards."""
    return out / f"{split}-index.npy"


class ShardWriter:
    """Writes samples to SPLIT-000000.tar, SPLIT-000001.tar, ... in a folder."""

    def __init__(self, folder: Path, split: str, shard_bytes: int, shard_samples: int) -> None:
        """Writes at most about `shard_bytes` and `shard_samples` into a shard."""
        self.folder, self.split = folder, split
        self._shard_bytes, self._shard_samples = shard_bytes, shard_samples
        self._writer: Any = None
        self._file: Any = None
        self._samples = 0
        self.shards: list[Shard] = []

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._close_shard()

    def write(
        self, key: str, extension: str, data: bytes, label: int | None, mask: bytes | None = None
    ) -> None:
        """Appends a sample; its bytes are stored unchanged. Without a label it has no `.cls`."""
        size = len(data) + len(mask or b"")
        if self._file is not None and (
            self._samples >= self._shard_samples or self._file.tell() + size > self._shard_bytes
        ):
            self._close_shard()
        if self._file is None:
            self._file = (self.folder / f"{self.split}-{len(self.shards):06d}.tar").open("wb")
            # Without time and user, equal sources give equal bytes.
            self._writer = wds.TarWriter(self._file, encoder=False, mtime=0, user="", group="", mode=0o644)
        sample: dict[str, Any] = {"__key__": key, extension: data}
        if mask is not None:
            sample[MASK_EXTENSION] = mask
        if label is not None:
            sample["cls"] = str(label).encode()
        self._writer.write(sample)
        self._samples += 1

    def _close_shard(self) -> None:
        if self._file is None:
            return
        self._writer.close()
        self._file.flush()
        os.fsync(self._file.fileno())
        path = Path(self._file.name)
        self._file.close()
        self.shards.append(describe_shard(path, self._samples))
        self._writer = self._file = None
        self._samples = 0


@contextmanager
def only_writer(out: Path) -> Iterator[None]:
    """Locks an output folder, creating it if needed; raises InputError if another process has the lock."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise InputError(f"{out}: not a directory") from None
    path = out / ".prepare.lock"
    if (lock := try_lock(path)) is None:
        raise InputError(f"{out} is in use by another prepare; wait until it ends, or give another folder")
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        lock.close()


def check_no_foreign_shards(splits: Iterable[str], existing: Dataset | None, out: Path) -> None:
    """Raises InputError if shards with the names of these splits are not ours, and would be replaced."""
    for split in splits:
        # A hidden folder beside them shows that they are ours, from a call that was killed while it moved shards.
        if (existing is not None and split in existing.splits) or partial_folder(out, split).exists():
            continue
        if strangers := sorted(out.glob(_SHARD_PATTERN.format(split=split))):
            raise InputError(
                f"{strangers[0]} is not described by {FILE_NAME}; give another folder, or --overwrite to replace it"
            )


def publish(
    out: Path,
    dataset: Dataset | None,
    classes: list[str],
    split: str,
    part: Split,
    statistics: Statistics,
    segmentation: Segmentation | None = None,
) -> Dataset:
    """Moves a split's shards into place, then adds it to the description `dataset` of those that stay, if any do."""
    # Earlier splits without labels count zero images of the classes that this split brings.
    splits = {
        name: info if info.class_counts else info.model_copy(update={"class_counts": [0] * len(classes)})
        for name, info in (dataset.splits.items() if dataset else ())
    }
    # `dataset.json` must not list old shards once the new ones replace them, nor beside the new classes.
    if dataset is not None:
        write_description(out, dataset)
    else:
        (out / FILE_NAME).unlink(missing_ok=True)
    for stale in (*out.glob(_SHARD_PATTERN.format(split=split)), index_path(out, split)):
        stale.unlink(missing_ok=True)
    partial, listed = partial_folder(out, split), excluded_file(split)
    (out / listed).unlink(missing_ok=True)
    if (partial / listed).exists():
        os.rename(partial / listed, out / listed)
    for shard in part.shards:
        os.rename(partial / shard.file, out / shard.file)
    bar = progress(part.shards, desc="indexing", unit=" shards", delay=2, leave=False)
    rows = [index_shard(out / shard.file, number) for number, shard in enumerate(bar)]
    splits[split] = part.model_copy(update={"index": write_index(out, rows, split)})
    if split == "train" or dataset is None:
        dataset = describe(classes, splits, statistics)
    else:
        dataset = dataset.model_copy(update={"classes": classes, "splits": dict(sorted(splits.items()))})
    dataset = dataset.model_copy(update={"segmentation": segmentation})
    write_description(out, dataset)
    # Last: until here, the hidden folder shows that the shards are ours, should this be killed.
    partial.rmdir()
    return dataset


def write_index(out: Path, rows: Sequence[np.ndarray], split: str) -> IndexFile:
    """Writes a split's index beside its shards, from the rows of each."""
    path, ends = index_path(out, split), np.cumsum([len(part) for part in rows])
    with replacing(path) as partial:
        # The index of a billion samples has 24 GB: they must be in memory only once.
        array = create_array(partial, ROW, (int(ends[-1]),))
        for part, end in zip(rows, ends.tolist(), strict=True):
            array[end - len(part) : end] = part
        array.flush()
    return IndexFile(file=path.name, bytes=path.stat().st_size, sha256=file_digest(path))


def describe(classes: list[str], splits: dict[str, Split], statistics: Statistics) -> Dataset:
    """Builds the description of a folder, with the statistics of one split's images."""
    table, mean, std = statistics.describe_bands()
    return Dataset(
        format=FORMAT,
        tool=f"mae-vit {__version__}",
        classes=classes,
        channels=len(mean),
        mean=mean,
        std=std,
        statistics_images=statistics.images,
        band_table=table,
        splits=dict(sorted(splits.items())),
    )


def write_description(out: Path, dataset: Dataset) -> None:
    """Writes `dataset.json`, atomically."""
    with replacing(out / FILE_NAME) as partial:
        partial.write_text(dataset.to_json(), encoding="utf-8")
