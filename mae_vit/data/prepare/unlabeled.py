"""`prepare --unlabeled DIR`: more images for pretraining, without labels, beside the labeled ones."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from mae_vit.core.errors import InputError
from mae_vit.core.messages import count_of
from mae_vit.data.prepare.entries import Entry, ImageSource, SourceOptions, unique_key
from mae_vit.data.prepare.sources.find import find_images


def open_unlabeled(
    spec: str, sources: Sequence[ImageSource], specs: Sequence[str], options: SourceOptions
) -> ImageSource:
    """Opens the training images of a source, without those that the labeled sources have too.

    People often pick the images that they label from the others. A copy of a held-out image would be trained on.
    Copies are found by their bytes, and between folders alone. `specs` has the path of each labeled source.

    Raises:
        InputError: if it holds no further training images.
    """
    found = find_images(spec, options.out, labels=False)
    entries = [entry for entry in found.entries if entry.split == "train"]
    notes = list(found.notes)
    if others := len(found.entries) - len(entries):
        notes.append(f"left out {count_of(others, 'image')} of {spec} in folders of other splits")
    fresh = entries
    if len(specs) == len(sources) == 1 and Path(specs[0]).is_dir() and Path(spec).is_dir():
        fresh = _without_copies(entries, Path(spec), sources[0].entries, Path(specs[0]))
    if copies := len(entries) - len(fresh):
        notes.append(f"left out {count_of(copies, 'image')} of {spec} that {specs[0]} has too")
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


def _without_copies(
    entries: Sequence[Entry], folder: Path, labeled: Sequence[Entry], labeled_folder: Path
) -> list[Entry]:
    by_size: dict[int, list[Entry]] = defaultdict(list)
    for entry in labeled:
        by_size[_size(labeled_folder / entry.path)].append(entry)
    by_size.pop(-1, None)
    # Only images of equal size are read.
    digests: dict[int, set[bytes]] = {}

    def is_copy(entry: Entry) -> bool:
        size = _size(folder / entry.path)
        if size in by_size and size not in digests:
            digests[size] = {_digest(other) for other in by_size[size]}
        return size in digests and _digest(entry) in digests[size]

    return [entry for entry in entries if not is_copy(entry)]


def _size(path: Path) -> int:
    """Returns the size of an image file; -1 for one inside a shard or a table of the folder."""
    with suppress(OSError):
        return path.stat().st_size
    return -1


def _digest(entry: Entry) -> bytes:
    return hashlib.sha256(entry.read()).digest()
