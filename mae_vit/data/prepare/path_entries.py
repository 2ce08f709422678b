"""Makes entries from the paths of images: split, class and key."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import replace
from pathlib import PurePosixPath

from mae_vit.core.errors import InputError
from mae_vit.data.prepare.entries import Entry, ImageSource, SourceOptions, class_text, unique_key
from mae_vit.data.prepare.folder_names import NAME_ENCODING, Parts, level_note, place
from mae_vit.data.prepare.label_lists import labels_beside
from mae_vit.data.prepare.listing import Listing, leave_out, shown


def entries_from_paths(
    files: Listing, options: SourceOptions, *, where: str, name: str, wrapped: bool = False
) -> ImageSource:
    """Derives split and class from paths: [SPLIT/][CLASS/].../file below one common top.

    `wrapped` says that a single folder around all files is the archive's wrapper, no class.

    Raises:
        InputError: if only some images of a split lie in class folders, or a class's name is invalid.
    """
    labels, split = options.labels, options.split
    leave_out(files, PurePosixPath(name).name.partition(".")[0], companions=options.class_folder is None)
    paths = [tuple(path.split("/")) for path, _ in files.images]
    level = options.class_folder if labels else "first"
    try:
        placed = place(paths, split, where=where, class_folder=level)
    except InputError as error:
        if tables := files.tables() if labels else []:
            raise InputError(
                f"{error}; {shown(tables)} may hold labels: give it in place of the folder"
            ) from None
        raise
    folders = {parts[0] if len(parts) > 1 else None for _, parts in placed}
    if wrapped and len(folders) == 1 and {own for own, _ in placed} == {split}:
        below = [parts[1:] for _, parts in placed]
        if None in folders or all(len(parts) == 1 for parts in below):
            placed, labels = [(split, below[n] or parts) for n, (_, parts) in enumerate(placed)], False
        else:  # the wrapper holds class folders, and an image beside them
            placed = place(below, split, where=where, class_folder=level)
    flat = _flat_splits(placed, where) if labels else {own for own, _ in placed}
    keys: dict[str, dict[str, int]] = {}
    entries = []
    for (own, parts), (path, read) in zip(placed, files.images, strict=True):
        stem = parts[-1].rpartition(".")[0] or parts[-1]
        class_name = None if own in flat else _checked_class(parts[0], where)
        if class_name is None:
            base = "/".join([*parts[:-1], stem.replace(".", "_")])
        else:
            base = f"{class_name}/{'_'.join([*parts[1:-1], stem]).replace('.', '_')}"
        key = unique_key(base, keys.setdefault(own, {}))
        entries.append(Entry(own, class_name, key, path, files.extension(path), read))
    list_notes: list[str] = []
    if labels:
        classes = {entry.class_name for entry in entries if entry.class_name is not None}
        unlabeled = [entry.path for entry in entries if entry.class_name is None]
        listed, list_notes = labels_beside(unlabeled, classes, files.texts)
        entries = [replace(e, class_name=listed[e.path]) if e.path in listed else e for e in entries]
    labeled = any(entry.class_name is not None for entry in entries)
    classed = [(own, parts) for own, parts in placed if own not in flat]
    notes = [*files.all_notes(labeled=labeled), *list_notes, *level_note(classed, options.class_folder)]
    return ImageSource(name, entries, notes=tuple(notes))


def _checked_class(folder: str, where: str) -> str:
    name = class_text(folder)
    if name != unicodedata.normalize("NFC", folder):
        # Names not in UTF-8 reach Python as surrogates, which JSON rejects.
        raise InputError(f"{where}: the class folder {name} is unprintable or not in UTF-8: {NAME_ENCODING}")
    return name


def _flat_splits(placed: Sequence[tuple[str, Parts]], where: str) -> set[str]:
    """Returns the splits without class folders; raises InputError if some images of a split are in one."""
    classed = {own for own, parts in placed if len(parts) > 1}
    flat: dict[str, str] = {}
    for own, parts in placed:
        if len(parts) == 1:
            flat.setdefault(own, parts[0])
    for own in sorted(classed & set(flat)):
        raise InputError(
            f'{where}: the image "{flat[own]}" lies in no class folder, while others of split "{own}" do: move it, '
            "or mae-vit prepare --no-labels"
        )
    return set(flat)
