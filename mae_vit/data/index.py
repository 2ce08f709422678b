"""Random access to the samples of a split: where each lies in its shard.

The index is built on first use by walking the tar headers, kept as one memory-mapped
array, and rebuilt whenever `dataset.json` describes other shards.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
from tqdm import tqdm

from mae_vit.data.dataset import Dataset, Split, read_dataset
from mae_vit.data.samples import class_number, read_samples, split_key
from mae_vit.data.tarwalk import DamagedTar, walk_tar
from mae_vit.errors import InputError, nearest
from mae_vit.locks import locked

_ROW = np.dtype([("offset", "<i8"), ("length", "<i4"), ("shard", "<i4"), ("label", "<i4")])
_MAX_OPEN_SHARDS = 256
_MAX_STATTED_SHARDS = 64


class ShardIndex:
    """The samples of one split, by number.

    Attributes:
        split: its name.
        folder: of the shards.
        dataset: what the folder holds.
        fingerprint: changes when any shard does.
    """

    def __init__(self, folder: Path, split: str, dataset: Dataset, array_path: Path) -> None:
        """Opens a built index; `open_index` builds it."""
        self.folder = folder
        self.split = split
        self.dataset = dataset
        self.fingerprint = fingerprint_of(dataset.splits[split])
        self._array_path = array_path
        self._rows = np.load(array_path, mmap_mode="r")
        self._open: OrderedDict[int, int] = OrderedDict()

    @property
    def split_info(self) -> Split:
        """What `dataset.json` says of the split."""
        return self.dataset.splits[self.split]

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def labels(self) -> np.ndarray:
        """int32 (N,), -1 where there is none."""
        return self._rows["label"]

    def read(self, sample: int) -> bytes:
        """Reads the encoded image of a sample."""
        row = self._rows[sample]
        return os.pread(self._descriptor(int(row["shard"])), int(row["length"]), int(row["offset"]))

    def keys(self) -> list[str]:
        """Returns the key of every sample, kept beside the index once they were read from the tars."""
        path = self.cache_path("keys.json")
        with self.locked():
            with suppress(OSError, ValueError):
                found = json.loads(path.read_text(encoding="utf-8"))
                if isinstance(found, list) and len(found) == len(self):
                    return found
            shards = [self.folder / shard.file for shard in self.split_info.shards]
            try:
                found = [sample.key for shard in shards for sample in read_samples(shard)]
            except (DamagedTar, OSError) as error:
                raise InputError(f"keys of the samples cannot be read: {error}") from None
            partial = path.with_name(f".{path.name}.{os.getpid()}")
            # Names in tars need not be Unicode; JSON's escapes hold any.
            partial.write_text(json.dumps(found), encoding="utf-8")
            os.replace(partial, path)
            return found

    def locate(self, sample: int) -> tuple[Path, int]:
        """Returns the shard of a sample, and the offset of its image there."""
        row = self._rows[sample]
        return self.folder / self.split_info.shards[int(row["shard"])].file, int(row["offset"])

    def describe(self, sample: int) -> str:
        """Names a sample for people: shard, key and offset."""
        row = self._rows[sample]
        file, offset = self.split_info.shards[int(row["shard"])].file, int(row["offset"])
        names = (m.name for m in walk_tar(self.folder / file) if m.offset == offset)
        try:
            name = next(names, "?")
        except (OSError, DamagedTar):
            name = "?"
        return f"shard {file}, key {split_key(name)[0]}, offset {offset}"

    def cache_path(self, name: str) -> Path:
        """A path beside the index for data derived from this split; its name holds the fingerprint."""
        return self._array_path.with_name(f"{self.split}-{self.fingerprint[:16]}-{name}")

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Holds the lock of this split's derived files: one process of a node makes them."""
        with locked(self._array_path.with_name(f".{self.split}.lock")):
            yield

    def _descriptor(self, shard: int) -> int:
        if shard in self._open:
            self._open.move_to_end(shard)
            return self._open[shard]
        if len(self._open) >= _MAX_OPEN_SHARDS:
            os.close(self._open.popitem(last=False)[1])
        path = self.folder / self.split_info.shards[shard].file
        self._open[shard] = os.open(path, os.O_RDONLY)
        return self._open[shard]

    def __getstate__(self) -> dict[str, object]:
        # Workers map and open for themselves.
        state = {key: value for key, value in self.__dict__.items() if key != "_rows"}
        return {**state, "_open": OrderedDict()}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._rows = np.load(self._array_path, mmap_mode="r")

    def __del__(self) -> None:
        for descriptor in getattr(self, "_open", {}).values():
            os.close(descriptor)


def open_index(folder: Path, split: str) -> ShardIndex:
    """Opens the index of a split; builds it on first use, or when the shards are others.

    Raises:
        InputError: if folder, split or shards are missing, changed or damaged.
    """
    dataset = read_dataset(folder)
    if split not in dataset.splits:
        raise InputError(f'data folder {folder} has no split "{split}": {nearest(split, dataset.splits)}')
    info = dataset.splits[split]
    _check_shards(folder, info)
    cache = _cache_folder(folder)
    array_path = cache / f"{split}-{fingerprint_of(info)[:16]}.npy"
    # All ranks of a node come here at once: one builds, the others wait for it.
    with locked(cache / f".{split}.lock"):
        if not _is_whole(array_path, info):
            _build(folder, info, array_path)
            _drop_old(cache, split, array_path)
    return ShardIndex(folder, split, dataset, array_path)


def index_shard(path: Path, shard: int) -> np.ndarray:
    """Lists the samples of one shard: structured (n,), in the order of their images.

    Raises:
        DamagedTar: if the tar is damaged or holds an image twice under a key.
        OSError: if it cannot be read.
    """
    rows = [
        (sample.offset, sample.length, shard, class_number(path, sample)) for sample in read_samples(path)
    ]
    return np.array(rows, _ROW)


def _is_whole(array_path: Path, info: Split) -> bool:
    """Whether the index exists and fits: a crash of the machine may leave an empty file."""
    try:
        rows = np.load(array_path, mmap_mode="r")
    except (OSError, EOFError, ValueError):
        return False
    return rows.dtype == _ROW and rows.shape == (info.samples,)


def _build(folder: Path, info: Split, array_path: Path) -> None:
    described = sum(shard.samples for shard in info.shards)
    if described != info.samples:
        raise InputError(
            f"dataset.json of {folder} is damaged: it says {info.samples} samples, its shards {described}"
        )
    parts = []
    for number, shard in enumerate(tqdm(info.shards, desc="indexing", unit=" shards", delay=2, leave=False)):
        try:
            rows = index_shard(folder / shard.file, number)
        except (DamagedTar, OSError) as error:
            problem = str(error).removeprefix(f"{folder / shard.file}: ")
            raise InputError(f"shard {folder / shard.file} cannot be used: {problem}") from None
        if len(rows) != shard.samples:
            raise InputError(
                f"shard {shard.file} holds {len(rows)} samples, dataset.json says {shard.samples}"
            )
        parts.append(rows)
    partial = array_path.with_name(f".{array_path.name}.{os.getpid()}")
    with partial.open("wb") as file:
        np.save(file, np.concatenate(parts))
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, array_path)


def _check_shards(folder: Path, info: Split) -> None:
    """Stats up to 64 evenly spread shards; `mae-vit check` reads them all."""
    # First and last among them: copies break off at the end.
    chosen = np.linspace(0, len(info.shards) - 1, min(len(info.shards), _MAX_STATTED_SHARDS)).astype(int)
    for shard in (info.shards[number] for number in chosen):
        path = folder / shard.file
        try:
            size = path.stat().st_size
        except OSError:
            raise InputError(f"shard {path} is missing: run `mae-vit check {folder}`") from None
        if size != shard.bytes:
            raise InputError(
                f"shard {path} has {size} bytes, dataset.json says {shard.bytes}: see `mae-vit check {folder}`"
            )


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
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    cache = root / "mae-vit" / hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"no place for the index: neither {beside} nor {cache} can be written: {error}"
        ) from None
    return cache


def _drop_old(cache: Path, split: str, keep: Path) -> None:
    """Removes what was derived from earlier shards of this split."""
    for path in cache.glob(f"{split}-*"):
        # "train-*" finds the files of a split "train-more" as well.
        if re.match(rf"{re.escape(split)}-[0-9a-f]{{16}}[.-]", path.name) and not path.name.startswith(
            keep.stem
        ):
            path.unlink(missing_ok=True)
