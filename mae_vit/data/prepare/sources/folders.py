"""Reads folders of images: regular files and links to them, nothing that could block; split, class and key by path."""

from __future__ import annotations

import os
import stat
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path, PurePosixPath

from mae_vit.core.errors import InputError
from mae_vit.data.images.bounds import MAX_IMAGE_BYTES, DecodeError, check_bytes
from mae_vit.data.prepare.entries import (
    Entry,
    ImageSource,
    SourceOptions,
    class_text,
    raise_if_passing,
    unique_key,
)
from mae_vit.data.prepare.folder_names import NAME_ENCODING, Parts, level_note, place
from mae_vit.data.prepare.label_lists import labels_beside
from mae_vit.data.prepare.left_out import leave_out
from mae_vit.data.prepare.listing import Listing, shown


def open_folder(path: Path) -> Listing:
    """Lists the images below `path`, sorted by path; links are followed, as by torchvision's ImageFolder."""
    again = list[Path]()
    files = list_files(sorted(walk(path, again)), path)
    if again:
        links = shown([link.relative_to(path).as_posix() for link in again])
        files.notes.append(f"skipped links to folders that are already read: {links}")
    return files


def list_files(paths: Iterable[Path], top: Path) -> Listing:
    """Lists the images among files, by their paths below `top`, in the given order."""
    files, special = Listing(), list[str]()
    for file in paths:
        name = file.relative_to(top).as_posix()
        if is_regular(file):
            files.take(name, partial(read_file, file))
        else:
            special.append(name)
    if special:
        files.left_out |= dict.fromkeys(special, "not a regular file")
        files.notes.append(
            f"skipped {len(special)} that are not regular files: pipes, devices or dead links ({shown(special)})"
        )
    return files


def walk(top: Path, again: list[Path] | None = None) -> Iterator[Path]:
    """Yields the files below `top`, each folder once; `again` receives further links to a folder."""
    seen: set[tuple[int, int]] = set()
    # Links to folders are followed after all real folders have been visited.
    waiting, links = [top], list[Path]()
    while waiting or links:
        folder = waiting.pop() if waiting else links.pop(links.index(min(links)))
        status = folder.stat()
        if (status.st_dev, status.st_ino) in seen:
            if again is not None:
                again.append(folder)
            continue
        seen.add((status.st_dev, status.st_ino))
        with os.scandir(folder) as listed:
            for entry in listed:
                path = Path(entry.path)
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(path)
                elif entry.is_symlink() and path.is_dir():
                    links.append(path)
                else:
                    yield path


def is_regular(file: Path) -> bool:
    """Whether a path leads to a regular file."""
    try:
        return stat.S_ISREG(file.stat().st_mode)
    except (OSError, ValueError) as error:  # a name in a table may hold any character
        raise_if_passing(str(file), error)
        return False


def read_file(file: Path, length: int | None = None) -> bytes:
    """Reads a file, or its first bytes; raises DecodeError, and does not block, if it is no longer regular."""
    # O_NONBLOCK does not wait for a writer, should the file have become a pipe since it was listed.
    with os.fdopen(os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as opened:
        status = os.fstat(opened.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise DecodeError("not a regular file")
        if length is None:
            check_bytes(status.st_size)
        return opened.read(MAX_IMAGE_BYTES if length is None else length)


def entries_from_paths(
    files: Listing, options: SourceOptions, *, where: str, name: str, wrapped: bool = False
) -> ImageSource:
    """Derives split and class from paths: [SPLIT/][CLASS/].../file below one common top.

    `wrapped` says that a single folder around all files is the archive's wrapper, no class.

    Raises:
        InputError: if only some images of a split lie in class folders, or a class's name is invalid.
    """
    labels, split = options.labels, options.split
    asks = labels and options.class_folder is None
    wrappers = leave_out(files, PurePosixPath(name).name.partition(".")[0], labels=asks)
    paths = [tuple(path.split("/")) for path, _ in files.images]
    if wrappers:
        at = [next((n for n in range(1, len(parts)) if parts[:n] in wrappers), None) for parts in paths]
        paths = [parts[: n - 1] + parts[n:] if n else parts for n, parts in zip(at, paths, strict=True)]
    level = options.class_folder if labels else "first"

    def placed_below(paths: Sequence[Parts]) -> list[tuple[str, Parts]]:
        try:
            return place(paths, split, level)
        except InputError as error:
            tables = files.tables() if options.labels else []
            hint = f"; {shown(tables)} may contain labels; give it instead of the folder" if tables else ""
            raise InputError(f"{where}: {error}{hint}") from None

    placed = placed_below(paths)
    folders = {parts[0] if len(parts) > 1 else None for _, parts in placed}
    if wrapped and len(folders) == 1 and {own for own, _ in placed} == {split}:
        below = [parts[1:] for _, parts in placed]
        if None in folders or all(len(parts) == 1 for parts in below):
            placed, labels = [(split, below[n] or parts) for n, (_, parts) in enumerate(placed)], False
        else:  # the wrapper holds class folders, and an image beside them
            placed = placed_below(below)
    flat = _flat_splits(placed, files, where) if labels else {own for own, _ in placed}
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
    several = len({entry.class_name for entry in entries} - {None}) > 1
    classed = [(own, parts) for own, parts in placed if own not in flat]
    notes = [
        *files.all_notes(advise=options.labels and not several),
        *list_notes,
        *level_note(classed, options.class_folder),
    ]
    return ImageSource(name, entries, notes=tuple(notes), left_out=files.left_out, has_columns=False)


def _checked_class(folder: str, where: str) -> str:
    name = class_text(folder)
    if name != unicodedata.normalize("NFC", folder):
        # Names not in UTF-8 reach Python as surrogates, which JSON rejects.
        raise InputError(f"{where}: the class folder {name} is unprintable or not in UTF-8; {NAME_ENCODING}")
    return name


def _flat_splits(placed: Sequence[tuple[str, Parts]], files: Listing, where: str) -> set[str]:
    """Returns the splits without class folders; raises InputError if some images of a split are in one."""
    classed = {own for own, parts in placed if len(parts) > 1}
    flat = {own for own, parts in placed if len(parts) == 1}
    for (own, parts), (path, _) in zip(placed, files.images, strict=True):
        if len(parts) == 1 and own in classed:
            raise InputError(
                f'{where}: the image "{path}" is in no class folder, unlike others; move it, or use --no-labels'
            )
    return flat
