"""Opens the images to embed, in order: a folder, an archive or prepared shards."""

from __future__ import annotations

import csv
import hashlib
import io
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from mae_vit.core.errors import InputError
from mae_vit.core.files import write_atomically
from mae_vit.core.messages import count_of, nearest, plain_text
from mae_vit.core.urls import is_url, redact_url
from mae_vit.core.user_files import ARCHIVE_EXTENSIONS, HEAD_BYTES, extension_of, what_is
from mae_vit.data.index import open_index
from mae_vit.data.prepare.entries import Entry, ImageSource, unique_key
from mae_vit.data.prepare.sources.archives import is_tar
from mae_vit.data.prepare.sources.find import find_images, naming_prepare
from mae_vit.data.prepare.sources.folders import list_files, walk
from mae_vit.data.shards.dataset_json import FILE_NAME, SOURCES, Dataset, read_dataset

# Split of images outside split folders.
_NO_SPLIT = "all"
# Files of up to three blocks are sampled in full: most photographs of up to 200 px.
_BLOCK = 1 << 13


@dataclass(frozen=True)
class Images:
    """Encoded images in the order of their source.

    Attributes:
        name: name of the source, without paths of this machine.
        entries: the N images. In prepared shards `path` is the shard, and a read may also raise ReadError.
        labels: int32 (N,), -1 = none.
        classes: names of the labels.
        splits: names of the splits; empty without any.
        fingerprint: digest of the images and their order; of large files it takes parts.
        dataset: description of prepared shards; None for other sources.
        notes: remarks on files that are left out.
    """

    name: str
    entries: Sequence[Entry]
    labels: np.ndarray
    classes: tuple[str, ...]
    splits: tuple[str, ...]
    fingerprint: str
    dataset: Dataset | None = None
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.entries)

    def write_broken(self, path: Path, broken: Sequence[tuple[int, str]]) -> None:
        """Writes split, key, path and reason of the broken images; without any, removes an earlier list."""
        if not broken:
            path.unlink(missing_ok=True)
            return
        stream = io.StringIO()
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(("split", "key", "path", "reason"))
        for number, reason in broken:
            entry = self.entries[number]
            split = entry.split if self.splits else ""
            writer.writerow((split, entry.key, plain_text(entry.path), plain_text(reason)))
        write_atomically(path, stream.getvalue().encode())


def open_images(
    specs: Sequence[str], *, out: Path, splits: Sequence[str] = (), labels: bool = True
) -> Images:
    """Opens the images to embed, of all `splits` by default; takes `labels` from shards and class folders.

    `specs` is prepared shards (a folder with `dataset.json`), a source of `mae-vit prepare`, or image files; `out` is a
    folder for temporary files. Raises InputError if there are no such images or splits, or the folder does not match
    its description.
    """
    if len(specs) > 1:
        return _open_files(specs, splits)
    (spec,) = specs
    if is_url(spec):
        raise InputError(f"{redact_url(spec)} is remote; download it, and give a folder or an archive")
    wanted = tuple(dict.fromkeys(splits))
    if spec in SOURCES or (Path(spec) / FILE_NAME).is_file():
        return _open_shards(Path(spec), wanted, labels)
    if Path(spec).is_file() and extension_of(spec) not in (*ARCHIVE_EXTENSIONS, "parquet"):
        return _open_files([spec], splits)
    find = partial(find_images, spec, out=out, split=_NO_SPLIT, class_folder="first")
    with naming_prepare(spec):
        try:
            source = find(labels=labels)
        except InputError as error:  # of labels, which are not needed, or raised again
            source = find(labels=False)
            source = replace(source, notes=(f"labels are left out: {error}", *source.notes))
    return _open_source(source, Path(spec), wanted)


def _open_files(specs: Sequence[str], splits: Sequence[str]) -> Images:
    if splits:
        raise InputError(f"--split {splits[0]} has no effect for single files; leave it out")
    for spec in specs:
        if not Path(spec).is_file():
            why = "is a folder" if Path(spec).is_dir() else "does not exist"
            raise InputError(f"{redact_url(spec)} {why}; give image files, or one folder or archive")
    paths = [Path(path) for path in dict.fromkeys(map(os.path.abspath, specs))]
    top = Path(os.path.commonpath([path.parent for path in paths]))
    listing, taken = list_files(paths, top), dict[str, int]()
    if others := {*paths} - {top / name for name, _ in listing.images}:
        with min(others).open("rb") as file:
            kind = what_is(file.read(HEAD_BYTES)) or "not an image"
        raise InputError(f"{min(others)} is {kind}; give image files, or one folder or archive")
    entries = []
    for name, read in listing.images:
        key = unique_key(str(Path(name).with_suffix("")), taken)
        entries.append(Entry(_NO_SPLIT, None, key, name, listing.extension(name), read))
    name = count_of(len(paths), "file") if len(paths) > 1 else paths[0].name
    return _open_source(ImageSource(name, entries, notes=tuple(listing.notes)), top, ())


def _open_shards(folder: Path, splits: tuple[str, ...], with_labels: bool) -> Images:
    dataset = read_dataset(folder)
    indexes = [open_index(folder, split) for split in splits or dataset.splits]
    labels = np.concatenate([index.labels for index in indexes]).astype(np.int32)
    entries = []
    for index in indexes:
        try:
            keys = index.keys()
        except InputError:  # damaged samples have lost their keys
            keys = [index.find_key(sample) or "" for sample in range(len(index))]
        for sample, key in enumerate(keys):
            read = partial(index.read, sample)
            entries.append(Entry(index.split, None, plain_text(key), index.shard_of(sample), "", read))
    return Images(
        name=folder.resolve().name,
        entries=entries,
        labels=labels if with_labels else np.full_like(labels, -1),
        classes=tuple(dataset.classes),
        splits=tuple(index.split for index in indexes),
        fingerprint=_digest(f"{index.split} {index.fingerprint}" for index in indexes),
        dataset=dataset,
    )


def _open_source(source: ImageSource, path: Path, splits: tuple[str, ...]) -> Images:
    there = dict.fromkeys(entry.split for entry in source.entries)
    for split in splits:
        if split not in there:
            raise InputError(f'{path} has no split "{split}"; {nearest(split, there)}')
    entries = [entry for entry in source.entries if not splits or entry.split in splits]
    classes = source.classes or tuple(sorted({entry.class_name for entry in entries if entry.class_name}))
    label_of = {name: label for label, name in enumerate(classes)}
    present = tuple(dict.fromkeys(entry.split for entry in entries))
    listed = (f"{e.split} {e.key} {e.path} {e.class_name}" for e in entries)
    return Images(
        name=source.name,
        entries=entries,
        labels=np.array([label_of.get(entry.class_name or "", -1) for entry in entries], np.int32),
        classes=classes,
        splits=() if present == (_NO_SPLIT,) else present,
        fingerprint=_digest([*_contents(path, entries), *listed]),
        notes=source.notes,
    )


def _contents(path: Path, entries: Sequence[Entry]) -> list[str]:
    """Samples the image files, to detect replaced images; their times would change with copies."""
    if path.is_file():
        files = [path]
    elif not path.is_dir():
        return []  # a data set by its name
    elif (path / entries[0].path).is_file():
        files = [path / entry.path for entry in entries]
    else:
        files = sorted(file for file in walk(path) if is_tar(file) or file.suffix.lower() == ".parquet")
    return [_sample(file) if file.is_file() else "none" for file in files]


def _sample(path: Path) -> str:
    """Returns the size of a file in bytes, and a digest of its first, middle and last block."""
    size, digest = path.stat().st_size, hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        for start in sorted({0, max(0, size - _BLOCK) // 2, max(0, size - _BLOCK)}):
            file.seek(start)
            digest.update(file.read(_BLOCK))
    return f"{size} {digest.hexdigest()}"


def _digest(lines: Iterable[str]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for line in lines:
        digest.update(line.encode("utf-8", "surrogateescape") + b"\n")
    return digest.hexdigest()
