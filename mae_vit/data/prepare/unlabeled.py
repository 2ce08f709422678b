"""`prepare --unlabeled DIR`: more images for pretraining, without labels, beside the labeled ones."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from mae_vit.core.errors import InputError
from mae_vit.core.messages import count_of
from mae_vit.data.prepare.entries import Entry, ImageSource, SourceOptions, unique_key
from mae_vit.data.prepare.sources.find import find_images
from mae_vit.data.prepare.sources.tables import is_table


def open_unlabeled(
    spec: str, sources: Sequence[ImageSource], specs: Sequence[str], options: SourceOptions
) -> ImageSource:
    """Opens the training images of a source, without those that the labeled sources have too.

    People often pick the images that they label from the others. A copy of a held-out image would be trained on.
    Copies are found by their bytes, among the files of folders and tables. `specs` are the labeled sources' paths.

    Raises:
        InputError: if it holds no further training images.
    """
    found = find_images(spec, options.out, labels=False)
    entries = [entry for entry in found.entries if entry.split == "train"]
    notes = list(found.notes)
    if others := len(found.entries) - len(entries):
        notes.append(f"left out {count_of(others, 'image')} of {spec} in folders of other splits")
    labeled = _by_size([entry for source in sources for entry in source.entries], specs)
    unlabeled = _by_size(entries, [spec])
    if None in labeled or None in unlabeled:
        notes.append(
            f"warning: {spec} may have copies of images of {', '.join(specs)}, also held-out ones: only files of "
            "folders and tables are compared; unpack the others"
        )
    copies = _copies(unlabeled, labeled)
    fresh = [entry for entry in entries if entry.key not in copies]
    if copies:
        notes.append(f"left out {count_of(len(copies), 'image')} of {spec} that {', '.join(specs)} has too")
    if not fresh:
        raise InputError(
            f"--unlabeled {spec} has no training images that are not in {', '.join(specs)} too; leave it out"
        )
    taken = {entry.key: 2 for source in sources for entry in source.entries}
    keyed = [replace(entry, key=unique_key(f"{found.name}/{entry.key}", taken)) for entry in fresh]
    return replace(found, entries=keyed, notes=tuple(notes))


def split_off(source: ImageSource) -> list[ImageSource]:
    """Splits a source into the images with labels, or of other splits than train, and those without (none or one)."""
    train = [entry for entry in source.entries if entry.split == "train"]
    rest = [entry for entry in train if entry.class_name is None]
    if len(rest) in (0, len(train)):
        return [source]
    kept = [entry for entry in source.entries if entry.class_name is not None or entry.split != "train"]
    return [replace(source, entries=kept), replace(source, entries=rest, classes=None, notes=())]


def _by_size(entries: Sequence[Entry], specs: Sequence[str]) -> dict[int | None, list[Entry]]:
    """Returns entries by the size of their file in or beside `specs`; by None those inside an archive or a shard."""
    by_size: dict[int | None, list[Entry]] = defaultdict(list)
    folders = [folder for spec in specs for folder in _folders(Path(spec))]
    for entry in entries:
        # The paths of two folders may be equal.
        for size in {_size(folder / entry.path) for folder in folders} - {None} or {None}:
            by_size[size].append(entry)
    return by_size


def _folders(path: Path) -> list[Path]:
    """Returns the folders that the paths of a folder's or a table's images may start from."""
    if path.is_dir():
        return [path]
    return [path.parent, path.resolve().parent.parent] if is_table(path) else []


def _size(path: Path) -> int | None:
    with suppress(OSError):
        return path.stat().st_size
    return None


def _copies(
    unlabeled: Mapping[int | None, list[Entry]], labeled: Mapping[int | None, list[Entry]]
) -> set[str]:
    """Returns the keys of the images whose bytes are those of a labeled one; reads only images of equal size."""
    copies = set[str]()
    for size in (unlabeled.keys() & labeled.keys()) - {None}:
        digests = {_digest(entry) for entry in labeled[size]}
        copies |= {entry.key for entry in unlabeled[size] if _digest(entry) in digests}
    return copies


def _digest(entry: Entry) -> bytes:
    return hashlib.sha256(entry.read()).digest()
