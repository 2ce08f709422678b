"""The images that are to be embedded: of a folder, an archive or prepared shards, by number."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Protocol

import numpy as np

from mae_vit.core.errors import InputError
from mae_vit.core.messages import nearest, plain_text
from mae_vit.core.urls import is_url, redact_url
from mae_vit.data.index import ShardIndex, open_index
from mae_vit.data.prepare.entries import Entry, ImageSource
from mae_vit.data.prepare.sources.find import find_images
from mae_vit.data.prepare.sources.foreign_shards import find_shards
from mae_vit.data.shards.dataset_json import FILE_NAME, read_dataset

# Of images outside of split folders.
_NO_SPLIT = "all"


class Images(Protocol):
    """Encoded images in the order of their source.

    Attributes:
        name: for people.
        classes: names; labels are places in it.
        travels: data processes may have a copy and read for themselves.
    """

    name: str
    classes: tuple[str, ...]
    travels: bool

    def __len__(self) -> int: ...

    @property
    def fingerprint(self) -> str:
        """Changes when the images or their order do."""

    @property
    def labels(self) -> np.ndarray:
        """int32 (N,), negative where there is none."""

    @property
    def splits(self) -> tuple[str, ...]:
        """Names of the splits; empty where nothing is split."""

    def split_numbers(self, images: np.ndarray) -> np.ndarray:
        """Places in `splits`, where there are any, of images (K,)."""

    def read(self, image: int) -> bytes:
        """Reads one image.

        Raises:
            OSError, ReadError, DecodeError: if it is not there.
        """

    def keys(self, images: np.ndarray) -> list[str]:
        """What images (K,) are called; one image of a split has it."""

    def path(self, image: int) -> str:
        """Where an image lies, for people."""


def open_images(spec: str, *, out: Path, splits: Sequence[str] = (), labels: bool = True) -> Images:
    """Opens what is to be embedded.

    Args:
        spec: prepared shards (a folder with `dataset.json`), or what `mae-vit prepare` takes.
        out: a folder for temporary files.
        splits: which to take; all by default.
        labels: class folders and the labels of shards are taken.

    Raises:
        InputError: if there are no such images.
    """
    if is_url(spec):
        raise InputError(f"{redact_url(spec)}: images are read from here; give a folder or an archive")
    wanted = tuple(dict.fromkeys(splits))
    if (Path(spec) / FILE_NAME).is_file():
        return ShardImages(Path(spec), wanted, labels=labels)
    source = find_images(spec, out=out, split=_NO_SPLIT, labels=labels)
    return SourceImages(source, Path(spec), wanted)


class ShardImages:
    """Prepared shards; those that are damaged are taken as far as they can be read."""

    travels = True

    def __init__(self, folder: Path, splits: Sequence[str], *, labels: bool) -> None:
        """Opens the indexes.

        Raises:
            InputError: if there is no such split, or the folder is not as described.
        """
        self.name = folder.resolve().name
        dataset = read_dataset(folder)
        names = splits or tuple(dataset.splits)
        self._indexes = [open_index(folder, name) for name in names]
        self._ends = np.cumsum([len(index) for index in self._indexes])
        self._labels = labels
        self.classes = tuple(dataset.classes) if labels else ()

    def __len__(self) -> int:
        return int(self._ends[-1])

    @property
    def fingerprint(self) -> str:
        """Changes when the shards or their order do."""
        return _digest(f"{index.split} {index.fingerprint}" for index in self._indexes)

    @property
    def labels(self) -> np.ndarray:
        """int32 (N,), negative where there is none."""
        if not self._labels:
            return np.full(len(self), -1, np.int32)
        return np.concatenate([index.labels for index in self._indexes]).astype(np.int32)

    @property
    def splits(self) -> tuple[str, ...]:
        """Their names, in order."""
        return tuple(index.split for index in self._indexes)

    def split_numbers(self, images: np.ndarray) -> np.ndarray:
        """Places in `splits` of images (K,)."""
        return np.searchsorted(self._ends, images, side="right")

    def read(self, image: int) -> bytes:
        """Reads one image."""
        index, sample = self._find(image)
        return index.read(sample)

    def keys(self, images: np.ndarray) -> list[str]:
        """What images (K,) are called in their shards."""
        return [plain_text(self._keys[image]) for image in images.tolist()]

    def path(self, image: int) -> str:
        """The shard."""
        index, sample = self._find(image)
        return index.shard_of(sample)

    @cached_property
    def _keys(self) -> list[str]:
        keys: list[str] = []
        for index in self._indexes:
            try:
                keys += index.keys()
            except InputError:  # some are lost with their samples, which have no features either
                keys += [index.find_key(sample) or "" for sample in range(len(index))]
        return keys

    def _find(self, image: int) -> tuple[ShardIndex, int]:
        number = int(self.split_numbers(np.array(image)))
        return self._indexes[number], image - (int(self._ends[number - 1]) if number else 0)


class SourceImages:
    """What `mae-vit prepare` takes; its readers hold open files, which cannot travel."""

    travels = False

    def __init__(self, source: ImageSource, path: Path, splits: Sequence[str]) -> None:
        """Takes the splits `splits` of a source, all if there are none.

        Raises:
            InputError: if there is no such split.
        """
        self.name, self._path = source.name, path
        known = {entry.split for entry in source.entries}
        for split in splits:
            if split not in known:
                raise InputError(f'{path} has no split "{split}": {nearest(split, known)}')
        self._entries = [entry for entry in source.entries if not splits or entry.split in splits]
        names = {entry.class_name for entry in self._entries} - {None}
        self.classes = source.classes or tuple(sorted(map(str, names)))

    def __len__(self) -> int:
        return len(self._entries)

    @cached_property
    def fingerprint(self) -> str:
        """Changes with the names of the images, their order, and the size in bytes of their files."""
        listed = (f"{e.split} {e.key} {e.path} {e.class_name}" for e in self._entries)
        return _digest([*_sizes(self._path, self._entries), *listed])

    @cached_property
    def labels(self) -> np.ndarray:
        """int32 (N,), -1 where there is none."""
        number_of = {name: number for number, name in enumerate(self.classes)}
        return np.array([number_of.get(e.class_name or "", -1) for e in self._entries], np.int32)

    @cached_property
    def splits(self) -> tuple[str, ...]:
        """Names of the split folders, in order; empty where there are none."""
        found = tuple(dict.fromkeys(entry.split for entry in self._entries))
        return () if found == (_NO_SPLIT,) else found

    def split_numbers(self, images: np.ndarray) -> np.ndarray:
        """Places in `splits` of images (K,)."""
        number_of = {name: number for number, name in enumerate(self.splits)}
        return np.array([number_of[self._entries[image].split] for image in images.tolist()], np.int64)

    def read(self, image: int) -> bytes:
        """Reads one image."""
        return self._entries[image].read()

    def keys(self, images: np.ndarray) -> list[str]:
        """What images (K,) would be called in shards: their paths without the extension."""
        return [self._entries[image].key for image in images.tolist()]

    def path(self, image: int) -> str:
        """Its path in the source."""
        return plain_text(self._entries[image].path)


def _sizes(path: Path, entries: Sequence[Entry]) -> list[str]:
    """Sizes in bytes of the files that hold the images: another image of the same name has another one.

    Not their times, which change when files are copied to another disk.
    """
    if path.is_file():
        files = [path]
    elif not path.is_dir():
        return []  # a data set by its name
    elif (path / entries[0].path).is_file():
        files = [path / entry.path for entry in entries]
    else:
        files = find_shards(path)
    return [str(os.stat(file).st_size) if file.is_file() else "none" for file in files]


def _digest(lines: Iterable[str]) -> str:
    found = hashlib.blake2b(digest_size=16)
    for line in lines:
        found.update(line.encode("utf-8", "surrogateescape") + b"\n")
    return found.hexdigest()
