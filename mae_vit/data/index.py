"""Random access to the samples of a split, by their offsets in the shards.

The index is one memory-mapped array beside the shards, `SPLIT-index.npy`, which `mae-vit prepare` writes and
`dataset.json` names. Files derived from the shards later lie in `.index/`.
"""

from __future__ import annotations

import json
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import numpy as np
from filelock import FileLock

from mae_vit.core.errors import Damage, InputError, damage_allowed
from mae_vit.core.files import replacing
from mae_vit.core.messages import count_of, error_reason, nearest
from mae_vit.data.remote.cache import RemoteFolder, RemoteShards
from mae_vit.data.remote.folder import fetch_index
from mae_vit.data.shards import index_files
from mae_vit.data.shards.dataset_json import FILE_NAME, SOURCES, Dataset, Split, read_dataset
from mae_vit.data.shards.samples import read_samples, split_key
from mae_vit.data.shards.shard_files import ReadError, ShardFiles, misfit_shards
from mae_vit.data.shards.tar_headers import BLOCK, DamagedTar, name_is_cut, plain_name, walk_tar

# An index of up to 170,000 samples is compared whole at each start (0.01 s); a larger one by size and type only.
_COMPARED_BYTES = 1 << 22
_NAMED = 3


class ShardIndex(ABC):
    """The samples of one split, by number: of shards, or of a data set that presents itself as one shard.

    Attributes:
        folder: folder of the shards.
        dataset: description of the folder; absent in data workers.
        bands: meaning of raw values.
        one_size: (height, width) of all images of the split in pixels; None if they differ.
        fingerprint: hash that changes when any shard does.
        remote: the remote folder that this one caches; None if the shards are local.
        labels: int32 (N,); -1 for samples without a label.
    """

    labels: np.ndarray

    def __init__(
        self, folder: Path, split: str, dataset: Dataset, remote: RemoteFolder | None = None
    ) -> None:
        """Describes the split; reads nothing."""
        self.folder, self.split, self.dataset, self.remote = folder, split, dataset, remote
        self.fingerprint, self.bands = index_files.fingerprint_of(dataset.splits[split]), dataset.bands
        (low, high), (left, right) = self.split_info.height, self.split_info.width
        self.one_size = (low, left) if (low, left) == (high, right) else None

    @property
    def split_info(self) -> Split:
        """The split's entry in `dataset.json`."""
        return self.dataset.splits[self.split]

    def __len__(self) -> int:
        return len(self.labels)

    @abstractmethod
    def read(self, sample: int) -> bytes:
        """Reads the encoded image of a sample; raises ReadError if it cannot be read."""

    @abstractmethod
    def shard_of(self, sample: int) -> str:
        """Returns the name of the shard that holds a sample."""

    @abstractmethod
    def find_key(self, sample: int) -> str | None:
        """Returns the key of a sample; None if it cannot be found."""

    @abstractmethod
    def keys(self) -> list[str]:
        """Returns the key of every sample; raises InputError if they cannot be read."""

    def damage(self, sample: int, reason: str) -> Damage:
        """Describes a sample that cannot be used."""
        return Damage(sample, self.shard_of(sample), self.find_key(sample), None, reason)

    def missing_samples(self) -> tuple[np.ndarray, list[str]]:
        """Returns the samples int64 (K,) that local shards lack, judged by file size, and a message for each shard."""
        return np.zeros(0, np.int64), []

    def cache_path(self, name: str) -> Path:
        """Returns the path of a file derived from the samples; its name contains the fingerprint."""
        return index_files.cache_folder(self.folder) / f"{self.split}-{self.fingerprint[:16]}-{name}"

    def drop_stale(self) -> None:
        """Removes derived files of earlier shards or of only some shards of this split, and earlier indexes."""
        current = f"{self.split}-{self.fingerprint[:16]}-"
        for path in index_files.cache_folder(self.folder).glob(f"*{self.split}-*"):
            # The pattern also matches files of a split "train-more".
            ours = re.match(rf"\.?{re.escape(self.split)}-[0-9a-f]{{16}}[.-]", path.name)
            # A leading dot (`replacing`) marks the file of a killed process, as this process holds the lock.
            if ours and (path.name.endswith("-partial.npy") or not path.name.startswith(current)):
                path.unlink(missing_ok=True)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Holds the lock of this split's derived files, so that one process of a node writes them."""
        with FileLock(index_files.cache_folder(self.folder) / f".{self.split}.lock"):
            yield

    def __getstate__(self) -> dict[str, object]:
        return {key: value for key, value in self.__dict__.items() if key != "dataset"}


class TarIndex(ShardIndex):
    """The samples of a split's shards, by their offsets.

    Attributes:
        array_path: file of the index.
    """

    def __init__(
        self, folder: Path, split: str, dataset: Dataset, array_path: Path, remote: RemoteFolder | None = None
    ) -> None:
        """Memory-maps an index, which `open_index` locates and checks."""
        super().__init__(folder, split, dataset, remote)
        self.array_path, shards = array_path, self.split_info.shards
        self._files = RemoteShards(remote, shards) if remote else ShardFiles(folder, shards)
        self._open_rows()

    def read(self, sample: int) -> bytes:
        """Reads the encoded image of a sample.

        Raises:
            ReadError: if it cannot be read, or the shard contains another sample there.
        """
        offset, length, shard, _, check = self._rows.item(sample)
        # Read with its header: a shard that was written again may hold another image there.
        data = self._files.read(shard, offset - BLOCK, BLOCK + length)
        if not index_files.plain_key_fits(data, check) and self._holds_other(shard, offset, data[:BLOCK]):
            raise ReadError("the shard contains another sample there")
        return data[BLOCK:]

    def read_at(self, sample: int, offset: int, length: int) -> bytes:
        """Reads bytes of the shard that a sample lies in; raises ReadError if they cannot be read."""
        return self._files.read(self._rows.item(sample)[2], offset, length)

    def _holds_other(self, shard: int, offset: int, header: bytes) -> bool:
        """Whether a header with an unexpected name belongs to another sample; long names are in blocks before it."""
        if name_is_cut(header):
            return False
        return offset < 2 * BLOCK or b" path=" not in self._files.read(shard, offset - 2 * BLOCK, BLOCK)

    def missing_samples(self) -> tuple[np.ndarray, list[str]]:
        """Returns the samples that missing, cut and changed shards lack: see `ShardIndex`."""
        lost, problems, shards = [np.zeros(0, np.int64)], list[str](), self.split_info.shards
        ends = np.cumsum([shard.samples for shard in shards])
        sizes = {} if self.remote else misfit_shards(self.folder, shards)
        for number, size in sorted(sizes.items()):
            shard, first = shards[number], int(ends[number]) - shards[number].samples
            rows = self._rows[first : ends[number]]
            # Nothing is read from a larger shard.
            end = 0 if size is None or size > shard.bytes else size
            lost.append(np.flatnonzero(rows["offset"] + rows["length"] > end) + first)
            problem = "is missing" if size is None else f"has {size} bytes, dataset.json says {shard.bytes}"
            problems.append(f"shard {self.folder / shard.file} {problem}")
        return np.concatenate(lost), problems

    def damage(self, sample: int, reason: str) -> Damage:
        """Describes a sample that cannot be used, with its place in the shard."""
        return replace(super().damage(sample, reason), offset=int(self._rows[sample]["offset"]))

    def shard_of(self, sample: int) -> str:
        """Returns the name of the shard that holds a sample."""
        return self._files.names[self._rows[sample]["shard"]]

    def shards_of(self, samples: np.ndarray) -> np.ndarray:
        """Returns the numbers of the shards that hold samples."""
        return np.asarray(self._rows["shard"][samples])

    def fetch(self, shard: int) -> Path:
        """Returns the local path of a shard, which is downloaded first if the folder is remote.

        Raises:
            ReadError: if its source does not have it.
            FetchUnavailable: if it cannot be fetched now.
        """
        return self._files.path(shard)

    def find_key(self, sample: int) -> str | None:
        """Reads the key of a sample from its header; None if the shard does not match the index."""
        row = self._rows[sample]
        shard, offset = int(row["shard"]), int(row["offset"])
        try:
            # The block before the image holds names of up to 100 bytes.
            name = plain_name(self._files.read(shard, offset - BLOCK, BLOCK))
            key = split_key(name)[0]
            if index_files.key_check(key) != row["key"]:
                members = walk_tar(self._files.path(shard))
                key = next(split_key(member.name)[0] for member in members if member.offset == offset)
        except (ReadError, OSError, DamagedTar, StopIteration):
            return None
        return key if index_files.key_check(key) == row["key"] else None

    def keys(self) -> list[str]:
        """Returns the key of every sample; the first call reads all headers and stores the keys in `.index/`.

        Raises:
            InputError: if a shard cannot be read, or does not match the index.
        """
        path = self.cache_path("keys.json")
        # Many ranks ask at once, and parsing a million names takes a while: stored keys are read without the lock.
        if (stored := index_files.stored_keys(path, len(self))) is not None:
            return stored
        with self.locked():
            # Another process may have stored them meanwhile.
            if (stored := index_files.stored_keys(path, len(self))) is not None:
                return stored
            firsts = accumulate((shard.samples for shard in self.split_info.shards[:-1]), initial=0)
            keys = [key for number, first in enumerate(firsts) for key in self._keys_of_shard(number, first)]
            # Names in tars need not be Unicode; JSON's escapes hold any.
            with replacing(path) as partial:
                partial.write_text(json.dumps(keys), encoding="utf-8")
        return keys

    def _keys_of_shard(self, number: int, first: int) -> list[str]:
        """Returns the keys of a shard whose first sample is number `first`."""
        shard, names = self.split_info.shards[number], dict[int, str]()
        why = "contains other samples than its index says"
        try:
            names.update((sample.offset, sample.key) for sample in read_samples(self._files.path(number)))
        except (ReadError, DamagedTar, OSError) as error:
            why = f"cannot be read ({error_reason(error)})"
        rows = self._rows[first : first + shard.samples]
        keys = [names.get(offset, "") for offset in rows["offset"].tolist()]
        if [index_files.key_check(key) for key in keys] != rows["key"].tolist():
            raise InputError(
                f'keys of split "{self.split}" are needed, but shard {self.folder / shard.file} {why}; see '
                f"`mae-vit check {self.folder}`"
            )
        return keys

    def __getstate__(self) -> dict[str, object]:
        if not self._is_unchanged():
            raise InputError(
                f"{self.array_path} was replaced or removed while this command used it; put its data folder back, "
                "then run the same command again"
            )
        # Workers map the rows themselves; to read shards, `_files` is enough.
        return {key: value for key, value in super().__getstate__().items() if key not in ("_rows", "labels")}

    def _is_unchanged(self) -> bool:
        if (found := _identity(self.array_path)) == self._opened:
            return True
        # Touched, as some clusters make people do, is not replaced.
        return bool(found) and np.array_equal(np.load(self.array_path, mmap_mode="r"), self._rows)

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._open_rows()

    def _open_rows(self) -> None:
        # A plain array: taking a row of an np.memmap costs as much as reading a small image.
        self._opened = _identity(self.array_path)
        self._rows = np.asarray(np.load(self.array_path, mmap_mode="r"))
        self.labels = self._rows["label"]


def _identity(path: Path) -> tuple[int, ...]:
    """Returns numbers that differ if another file takes the place of `path`; none if no file is there.

    Not its inode: network file systems may number a file anew.
    """
    with suppress(FileNotFoundError):
        status = path.stat()
        return status.st_size, status.st_mtime_ns
    return ()


def open_index(folder: Path, split: str, *, remote: RemoteFolder | None = None) -> ShardIndex:
    """Opens the index that lies beside a split's shards, without reading the shards; `folder` caches `remote`.

    Raises:
        InputError: if folder, split or index is missing, or the index does not match the shards.
    """
    dataset = read_dataset(folder)
    if split not in dataset.splits:
        raise InputError(f'data folder {folder} has no split "{split}"; {nearest(split, dataset.splits)}')
    info = dataset.splits[split]
    described = sum(shard.samples for shard in info.shards)
    if described != info.samples:
        raise InputError(
            f"dataset.json of {folder} is damaged ({info.samples} samples, {described} in its shards); prepare it "
            "again"
        )
    if own := SOURCES.get(str(folder)):
        index: ShardIndex = own.open(split)
        return index
    if info.index is None:
        raise InputError(
            f'{FILE_NAME} of {folder} has no index for split "{split}"; {index_files.index_hint(folder)}'
        )
    if remote is not None:
        return TarIndex(folder, split, dataset, fetch_index(remote, folder, split, dataset), remote)
    path, compare = folder / info.index.file, info.index.bytes <= _COMPARED_BYTES
    if (problem := index_files.index_problem(path, info, len(dataset.classes), compare=compare)) is not None:
        raise InputError(f"index {path} {problem}; {index_files.index_hint(folder)}")
    return TarIndex(folder, split, dataset, path)


def open_training_index(
    folder: Path, split: str, *, damage_budget: float, say: bool, remote: RemoteFolder | None = None
) -> ShardIndex:
    """Opens the index of a training split, even if some of its shards are missing or truncated; `say` warns of that.

    `damage_budget` is the share of its samples that may be lost.

    Raises:
        InputError: if more samples are lost, or the split does not exist.
    """
    index = open_index(folder, split, remote=remote)
    lost, problems = index.missing_samples()
    if not problems:
        return index
    allowed = damage_allowed(damage_budget, len(index))
    what = f'{len(lost):,} of {count_of(len(index), "sample")} of split "{split}" cannot be read'
    budget, where = f"data.damage_budget={damage_budget:g} allows {allowed:,}", _shorten(problems, folder)
    if len(lost) > allowed:
        raise InputError(f"{what} ({where}). {budget}; repair the shards or raise it")
    if say:
        print(f"warning: {what}, so others replace them ({budget}; {where})", file=sys.stderr)
    return index


def open_whole_index(folder: Path, split: str, *, remote: RemoteFolder | None = None) -> ShardIndex:
    """Opens the index of a split that must be complete, as for evaluation.

    Raises:
        InputError: if a shard is missing or has another size, or the split does not exist.
    """
    index = open_index(folder, split, remote=remote)
    _, problems = index.missing_samples()
    if problems:
        raise InputError(f'split "{split}" must be complete, but {_shorten(problems, folder)}')
    return index


def check_held_out(index: ShardIndex, held_out: np.ndarray) -> None:
    """Rejects lost validation images now rather than at the first evaluation.

    Raises:
        InputError: if any is lost, naming the first damaged shards.
    """
    missing, problems = index.missing_samples()
    lost = np.intersect1d(missing, held_out)
    if len(lost):
        raise InputError(
            f"{len(lost)} of the {len(held_out):,} validation images cannot be read "
            f"({_shorten(problems, index.folder)}); repair the shards, or use finetune.holdout=0"
        )


def _shorten(problems: Sequence[str], folder: Path) -> str:
    more = f" and {len(problems) - _NAMED} more" if len(problems) > _NAMED else ""
    return f"{'; '.join(problems[:_NAMED])}{more}; see `mae-vit check {folder}`"
