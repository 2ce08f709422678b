"""Random access to the samples of a split: where each lies in its shard.

The index is built on first use by walking the tar headers, kept as one memory-mapped
array, and rebuilt whenever `dataset.json` describes other shards or shards are newer.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
from filelock import FileLock

from mae_vit.core.errors import Damage, InputError
from mae_vit.core.files import replacing, user_cache
from mae_vit.core.messages import nearest
from mae_vit.core.urls import redact_url
from mae_vit.data.remote.folder import RemoteFolder, fetch_index
from mae_vit.data.remote.shards import RemoteShards
from mae_vit.data.shards.dataset_json import Dataset, Split, read_dataset
from mae_vit.data.shards.index_files import find_array, is_current, load_array, read_keys, read_notes
from mae_vit.data.shards.index_rows import ROW, RowFile, key_check, rows_fit
from mae_vit.data.shards.samples import read_groups, split_key
from mae_vit.data.shards.shard_files import ReadError, ShardFiles, ShardTable
from mae_vit.data.shards.tar_headers import BLOCK, DamagedTar, plain_name, walk_tar

_NPY_HEADER = 4096  # at most
# Not taken along to another process.
_OWN = ("_rows", "_row", "_row_file", "dataset")


class ShardIndex:
    """The samples of one split, by number.

    Attributes:
        split: its name.
        folder: of the shards.
        dataset: what the folder holds; not in data workers.
        one_size: (height, width) of all images of the split in pixels, None where they differ.
        fingerprint: changes when any shard does.
        problems: of shards that are not as described: file name and a predicate ("is missing").
        remote: what the folder stands in for; None if it holds the shards itself.
        array_path: of the index.
    """

    def __init__(
        self, folder: Path, split: str, dataset: Dataset, array_path: Path, remote: RemoteFolder | None = None
    ) -> None:
        """Opens a built index; `open_index` builds it."""
        self.folder, self.remote, self.array_path = folder, remote, array_path
        self.split = split
        self.dataset = dataset
        self.fingerprint = fingerprint_of(dataset.splits[split])
        self._open_rows()
        self._notes = read_notes(array_path)
        (low, high), (left, right) = self.split_info.height, self.split_info.width
        self.one_size = (low, left) if (low, left) == (high, right) else None
        shards, states = self.split_info.shards, self._notes.shards
        self.problems = {shards[number].file: problem for number, (_, problem) in states.items()}
        sizes = [shard.bytes for shard in shards]
        for number, (state, _) in states.items():
            sizes[number] = state.bytes or 0  # as they were when their headers were read
        self._shards = ShardTable([shard.file for shard in shards], sizes)
        self._files = RemoteShards(remote, shards) if remote else ShardFiles(folder, self._shards)

    @property
    def split_info(self) -> Split:
        """What `dataset.json` says of the split."""
        return self.dataset.splits[self.split]

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def labels(self) -> np.ndarray:
        """int32 (N,), -1 where there is none, -2 where it is lost with its sample."""
        return self._rows["label"]

    def labels_of(self, samples: np.ndarray) -> np.ndarray:
        """int32 (B,), the labels of samples (B,)."""
        return self._row_file.labels(samples)

    @property
    def lost(self) -> np.ndarray:
        """Numbers of the samples of which the headers alone say that they cannot be read, sorted."""
        # Over shards as described there are none: no need to read all rows.
        return np.flatnonzero(self._rows["length"] == 0) if self.problems else np.zeros(0, np.int64)

    def read(self, sample: int) -> bytes:
        """Reads the encoded image of a sample.

        Raises:
            ReadError: if it is not there.
        """
        offset, length, shard, _, _ = self._row(sample)
        if length == 0:
            raise ReadError(self.why_lost(sample))
        return self._files.read(shard, offset, length)

    def why_lost(self, sample: int) -> str:
        """Says why a sample of `lost` cannot be read, in short."""
        if sample in self._notes.samples:
            return self._notes.samples[sample][1]
        return f"the shard {self._notes.shards[int(self._rows[sample]['shard'])][1]}"

    def damage(self, sample: int, reason: str) -> Damage:
        """Describes a sample that cannot be used."""
        offset = int(self._rows[sample]["offset"])
        shard = self.shard_of(sample)
        return Damage(sample, shard, self.find_key(sample), None if offset < 0 else offset, reason)

    def shard_of(self, sample: int) -> str:
        """The file that a sample lies in."""
        return self._shards.name(int(self._rows[sample]["shard"]))

    def shards_of(self, samples: np.ndarray) -> np.ndarray:
        """The numbers of the shards that samples lie in."""
        return np.asarray(self._rows["shard"][samples])

    def fetch(self, shard: int) -> None:
        """Brings a shard here, if the folder is elsewhere.

        Raises:
            ReadError: if its source does not have it.
            FetchUnavailable: if it cannot be had now.
        """
        self._files.path(shard)

    def find_key(self, sample: int) -> str | None:
        """The key of a sample, None where it is lost with it; a small read."""
        row = self._rows[sample]
        if sample in self._notes.samples:
            return self._notes.samples[sample][0]
        if row["offset"] < 0:
            return None
        shard, offset = int(row["shard"]), int(row["offset"])
        try:
            # Names of up to 100 letters stand in the block before.
            name = plain_name(self._files.read(shard, offset - BLOCK, BLOCK))
            key = split_key(name)[0]
            if key_check(key) != row["key"]:
                members = walk_tar(self._files.path(shard))
                key = next(split_key(member.name)[0] for member in members if member.offset == offset)
        except (ReadError, OSError, DamagedTar, StopIteration):
            return None
        return key if key_check(key) == row["key"] else None

    def keys(self) -> list[str]:
        """Returns the key of every sample, kept beside the index once they were read from the tars.

        Raises:
            InputError: if a sample is lost with its key.
        """
        # Kept under the name of whole shards, they are those of damaged ones too.
        path = self.array_path.with_name(f"{self.split}-{self.fingerprint[:16]}-keys.json")
        # Many ranks ask at once, and to parse a million names takes a moment: no lock where they are kept.
        if (kept := read_keys(path, len(self))) is not None:
            return kept
        with self.locked():
            # Another process may have read them meanwhile.
            if (kept := read_keys(path, len(self))) is not None:
                return kept
            keys = self._read_keys()
            if not self.problems:
                # Names in tars need not be Unicode; JSON's escapes hold any.
                with replacing(path) as partial:
                    partial.write_text(json.dumps(keys), encoding="utf-8")
            return keys

    def _read_keys(self) -> list[str]:
        keys = {sample: key for sample, (key, _) in self._notes.samples.items() if key is not None}
        start = 0
        for number, shard in enumerate(self.split_info.shards):
            names: dict[int, str] = {}
            with suppress(ReadError, DamagedTar, OSError):
                for found in read_groups(self._files.path(number)):
                    names[found.offset] = found.key
            offsets = self._rows["offset"][start : start + shard.samples].tolist()
            keys |= {start + n: names[at] for n, at in enumerate(offsets) if at >= 0 and at in names}
            if any(sample not in keys for sample in range(start, start + shard.samples)):
                problem = self.problems.get(shard.file, "changed")
                raise InputError(
                    f"keys of the samples cannot be read: shard {self.folder / shard.file} {problem}: "
                    f"see `mae-vit check {self.folder}`"
                )
            start += shard.samples
        return [keys[sample] for sample in range(len(self))]

    def cache_path(self, name: str) -> Path:
        """A path beside the index for data derived from it; its name holds the fingerprint."""
        return self.array_path.with_name(f"{self.array_path.stem}-{name}")

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Holds the lock of this split's derived files: one process of a node makes them."""
        with FileLock(self.array_path.with_name(f".{self.split}.lock")):
            yield

    def __getstate__(self) -> dict[str, object]:
        # Workers map for themselves, and of shards they know what they need to read them.
        return {key: value for key, value in self.__dict__.items() if key not in _OWN}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._open_rows()

    def _open_rows(self) -> None:
        self._row_file = RowFile(self.array_path)
        self._rows, self._row = self._row_file.all, self._row_file.row


def open_index(
    folder: Path, split: str, *, tolerant: bool = False, remote: RemoteFolder | None = None
) -> ShardIndex:
    """Opens the index of a split; builds it on first use, or when the shards are others.

    Args:
        folder: of the shards.
        split: its name.
        tolerant: take shards that are missing or damaged: their samples are `lost`, all others
            keep their numbers. Shards elsewhere are taken as described until they are read.
        remote: what the folder stands in for.

    Raises:
        InputError: if folder or split are missing, or if shards are missing, changed or
            damaged and that is not tolerated.
    """
    dataset = read_dataset(folder)
    if split not in dataset.splits:
        raise InputError(f'data folder {folder} has no split "{split}": {nearest(split, dataset.splits)}')
    info = dataset.splits[split]
    described = sum(shard.samples for shard in info.shards)
    if described != info.samples:
        raise InputError(
            f"dataset.json of {folder} is damaged: it says {info.samples} samples, its shards {described}"
        )
    cache = _cache_folder(folder)
    plain = cache / f"{split}-{fingerprint_of(info)[:16]}.npy"
    # Once it is built nobody waits for a turn: 512 ranks may share a file system.
    if remote is None and is_current(folder, info, plain):
        with suppress(OSError, ValueError):  # another process has just removed it
            return ShardIndex(folder, split, dataset, plain)
    # All ranks of a node come here at once: one builds, the others wait for it.
    with FileLock(cache / f".{split}.lock"):
        if remote is None:
            array_path = find_array(folder, split, info, plain, tolerant=tolerant)
        else:
            array_path = _find_remote_array(remote, split, dataset, plain)
        return ShardIndex(folder, split, dataset, array_path, remote)


def _find_remote_array(remote: RemoteFolder, split: str, dataset: Dataset, path: Path) -> Path:
    """The array of a split whose shards lie elsewhere: fetched, once."""
    info = dataset.splits[split]
    if info.index is None:
        raise InputError(
            f'dataset.json of {redact_url(remote.url)} names no index of split "{split}", and to make one all shards '
            "would be read: write the folder with this version's `mae-vit prepare`"
        )
    if load_array(path, info) is None:
        if info.index.bytes > info.samples * ROW.itemsize + _NPY_HEADER:
            raise InputError(
                f"index {info.index.file} of {redact_url(remote.url)} is too large for its samples"
            )
        fetch_index(remote, info.index, path)
        rows = load_array(path, info)
        if rows is None or not rows_fit(rows, info.shards, len(dataset.classes)):
            path.unlink()
            raise InputError(f"index {info.index.file} of {redact_url(remote.url)} is not that of its shards")
    return path


def fingerprint_of(info: Split) -> str:
    """Returns what changes when any shard of a split does."""
    text = "\n".join(f"{shard.file} {shard.samples} {shard.bytes} {shard.sha256}" for shard in info.shards)
    return hashlib.sha256(text.encode()).hexdigest()


def _cache_folder(folder: Path) -> Path:
    """`.index/` beside the shards, or the user's cache where that cannot be written."""
    beside = folder / ".index"
    try:
        beside.mkdir(exist_ok=True)
        if os.access(beside, os.W_OK):
            return beside
    except OSError:
        pass
    cache = user_cache() / hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"no place for the index: neither {beside} nor {cache} can be written: {error}"
        ) from None
    return cache
