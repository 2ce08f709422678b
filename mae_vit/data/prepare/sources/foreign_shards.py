"""Shards made by others: tars of KEY.jpg, KEY.cls, KEY.json, without `dataset.json`."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from mae_vit.core.errors import InputError
from mae_vit.core.messages import plain_text
from mae_vit.core.user_files import split_named
from mae_vit.data.images.decode import check_bytes
from mae_vit.data.prepare.entries import Entry, ImageSource, safe_member_path, unique_key
from mae_vit.data.shards.dataset_json import FILE_NAME, read_dataset
from mae_vit.data.shards.samples import Sample, read_samples
from mae_vit.data.shards.tar_headers import DamagedTar

# A number in a stranger's .cls must not make us write a list of billions of classes.
_MAX_CLASSES = 1_000_000


def find_shards(folder: Path) -> list[Path]:
    """Returns the tars in a folder and in split folders in it; with our `dataset.json`, those it names."""
    if (folder / FILE_NAME).exists():
        described = read_dataset(folder)
        return [folder / shard.file for split in described.splits.values() for shard in split.shards]
    found = [path for path in folder.glob("*.tar") if path.is_file()]
    for below in folder.iterdir():
        if split_named(below.name) and below.is_dir():
            found += [path for path in below.glob("*.tar") if path.is_file()]
    return sorted(found)


def split_of(shard: Path, folder: Path, default: str) -> str:
    """The split that a shard's name or folder tells ("imagenet-val-000012.tar"), or `default`."""
    words = re.split(r"[-_.]", shard.stem)
    if shard.parent != folder:
        words.insert(0, shard.parent.name)
    # The last is nearest to the shard's number.
    return next(filter(None, map(split_named, reversed(words))), default)


def holds_labels(path: Path) -> bool:
    """Whether a tar is a shard with labels, rather than an archive of class folders."""
    try:
        return any(sample.label is not None for sample in read_samples(path))
    except DamagedTar:
        return False


def open_shards(folder: Path, shards: Sequence[Path], *, split: str, name: str) -> ImageSource:
    """Lists the images of shards; their other members (captions, json) are not taken.

    Args:
        folder: that holds them.
        shards: to read.
        split: of shards whose names tell none.
        name: of the source.

    Raises:
        InputError: if one is damaged, holds paths that leave its folder, or its labels make
            no sense.
    """
    known = read_dataset(folder) if (folder / FILE_NAME).exists() else None
    splits = {s.file: name for name, info in known.splits.items() for s in info.shards} if known else {}
    found: list[tuple[str, Path, Sample]] = []
    for shard in shards:
        own = splits.get(shard.name) or split_of(shard, folder, split)
        try:
            found += [(own, shard, sample) for sample in read_samples(shard)]
        except (DamagedTar, OSError) as error:
            raise InputError(f"shard {shard} cannot be used: {error}") from None
    labels = {sample.label.strip() for _, _, sample in found if sample.label is not None}
    numbered = all(re.fullmatch(rb"[0-9]{1,9}", label) for label in labels)
    if known is not None:
        classes = known.classes
    elif numbered:
        classes = numbered_classes(max(map(int, labels), default=-1), folder)
    else:
        classes = sorted(map(_text, labels))
    entries = []
    keys: dict[str, dict[str, int]] = {}
    for own, shard, sample in found:
        safe_member_path(f"{sample.key}.{sample.extension}", str(shard))  # keys become names in our shards
        class_name = None
        if sample.label is not None:
            class_name = _class_of(sample, shard, classes) if numbered else _text(sample.label)
        key = unique_key(sample.key, keys.setdefault(own, {}))
        path = f"{plain_text(sample.key)}.{sample.extension}"
        read = partial(_read, shard, sample.offset, sample.length)
        entries.append(Entry(own, class_name, key, path, sample.extension, read))
    return ImageSource(name, entries, classes=tuple(classes) if classes else None)


def numbered_classes(largest: int, folder: Path) -> list[str]:
    """Names classes 0..largest of shards that say nothing of them.

    Raises:
        InputError: if the number is out of all proportion.
    """
    if largest >= _MAX_CLASSES:
        raise InputError(f"{folder}: a .cls says class {largest}; at most {_MAX_CLASSES} are taken")
    return [str(number) for number in range(largest + 1)]


def _text(label: bytes) -> str:
    return plain_text(label.strip().decode("utf-8", "surrogateescape"))


def _class_of(sample: Sample, shard: Path, classes: Sequence[str]) -> str:
    number = int(sample.label or b"")
    if number >= len(classes):
        raise InputError(
            f"shard {shard}: {plain_text(sample.key)}.cls says class {number}; there are {len(classes)}"
        )
    return classes[number]


def _read(shard: Path, offset: int, length: int) -> bytes:
    check_bytes(length)
    descriptor = os.open(shard, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.pread(descriptor, length, offset)
    finally:
        os.close(descriptor)
