"""Reads folders of images: regular files and links to them, nothing that could block."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO

from mae_vit.core.user_files import HEAD_BYTES
from mae_vit.data.images.decode import MAX_IMAGE_BYTES, DecodeError, check_bytes
from mae_vit.data.prepare.entries import Reader
from mae_vit.data.prepare.listing import Listing, shown


def open_folder(path: Path) -> Listing:
    """Lists the images below `path`, sorted by path; links are followed, as by torchvision's ImageFolder."""
    again = list[Path]()
    files = list_files(sorted(walk(path, again)), path)
    if again:
        links = shown([link.relative_to(path).as_posix() for link in again])
        files.notes.append(f"skipped links to folders that are taken already: {links}")
    return files


def list_files(paths: Iterable[Path], top: Path) -> Listing:
    """Lists the images among files, by their paths below `top`, in the given order."""
    files, special = Listing(), list[str]()
    for file in paths:
        name = file.relative_to(top).as_posix()
        if is_regular(file):
            files.take(name, partial(_head, file), reader(file))
        else:
            special.append(name)
    if special:
        files.notes.append(
            f"skipped {len(special)} that are no regular files: pipes, devices or dead links ({shown(special)})"
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
    except (OSError, ValueError):  # a name in a table may hold any character
        return False


def _open(file: Path) -> BinaryIO:
    # O_NONBLOCK does not wait for a writer, should the file have become a pipe since it was listed.
    opened = os.fdopen(os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    if not stat.S_ISREG(os.fstat(opened.fileno()).st_mode):
        opened.close()
        raise DecodeError("no regular file")
    return opened


def _head(file: Path) -> bytes:
    with suppress(OSError, DecodeError), _open(file) as opened:
        return opened.read(HEAD_BYTES)
    return b""


def reader(file: Path) -> Reader:
    """Returns a reader of a file; if the file is no longer regular, it raises an error instead of blocking."""
    return partial(_read, file)


def _read(file: Path) -> bytes:
    with _open(file) as opened:
        check_bytes(os.fstat(opened.fileno()).st_size)
        return opened.read(MAX_IMAGE_BYTES)
