"""Sorts the files of a folder or an archive: which are images, and notes on the others."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import islice

from mae_vit.core import user_files
from mae_vit.core.messages import count_of, plain_text
from mae_vit.data.images.bounds import DecodeError
from mae_vit.data.prepare.entries import Reader, raise_if_passing

# Classes in names: cat.0.jpg, dog_12.jpg, but not IMG_0001.jpg.
_CLASS_IN_NAME = re.compile(r"(\D*[a-z]{2}\D*?)[-_. ]*\d+\.\w+")
ARCHIVE_PART = re.compile(
    r"\.(z\d\d|(zip|7z|rar|tar|tgz|gz)[-_.]?(\d{2,3}|part\w*|[a-z]{2}))$", re.IGNORECASE
)
JOIN_PARTS = "join the parts first (cat ARCHIVE.* > ARCHIVE; zip -s 0 of .z01)"
_NAMED = 3
_NO_IMAGE, _NOT_HERE = "no image", "not downloaded"
# Number of texts in a folder that may be lists of labels; more are captions, one for each image.
_FEW_TEXTS = 8


@dataclass
class Listing:
    """The files of a folder or an archive.

    Attributes:
        images: path and reader of each image, by path.
        kinds: extensions of images whose names do not have them, by path.
        unread: number of files in formats that are not read but may matter, by extension.
        beside: tables and archives among the other files.
        texts: path and reader of texts that may list labels, a few of each folder.
        left_out: why each of the other files is not among the images.
        notes: remarks on skipped files.
    """

    images: list[tuple[str, Reader]] = field(default_factory=list)
    kinds: dict[str, str] = field(default_factory=dict)
    unread: Counter[str] = field(default_factory=Counter)
    beside: list[str] = field(default_factory=list)
    texts: list[tuple[str, Reader]] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def take(self, path: str, read: Callable[..., bytes]) -> None:
        """Adds a file as an image, or counts it; its first bytes, `read(length)`, decide if the name does not."""
        extension = user_files.extension_of(path)
        if user_files.is_image(path):
            self.images.append((path, read))
        elif user_files.is_placeholder(path):
            self.left_out[path] = _NOT_HERE
        elif user_files.is_hidden(path):
            self.left_out[path] = _NO_IMAGE
        elif extension in user_files.OTHER_EXTENSIONS:
            self.left_out[path] = _NO_IMAGE
            self.beside += [path] if _is_table(path) else []
            folder, before = path.rpartition("/")[0], self.texts[-_FEW_TEXTS:]
            few = len(before) < _FEW_TEXTS or before[0][0].rpartition("/")[0] != folder
            self.texts += [(path, read)] if few and extension in user_files.LIST_EXTENSIONS else []
        elif (
            kind := extension if extension in user_files.UNREAD_EXTENSIONS else _kind_by_head(path, read)
        ) in user_files.READ_EXTENSIONS:
            self.kinds[path] = kind or ""
            self.images.append((path, read))
        elif ARCHIVE_PART.search(path) or (
            extension in user_files.ARCHIVE_EXTENSIONS
            and user_files.full_extension(path) not in user_files.CONVERTIBLE_EXTENSIONS
        ):
            self.left_out[path] = _NO_IMAGE
            self.beside.append(path)
        else:
            self.unread[kind or user_files.full_extension(path)] += 1
            self.left_out[path] = "not read"

    def add(self, other: Listing, *, wrapping: str, folder: str) -> None:
        """Adds the files of another listing below `folder` ("a/", or ""), without the `wrapping` before their paths."""

        def moved(path: str) -> str:
            return folder + path.removeprefix(wrapping)

        self.images += [(moved(path), read) for path, read in other.images]
        self.kinds |= {moved(path): kind for path, kind in other.kinds.items()}
        self.unread += other.unread
        self.beside += map(moved, other.beside)
        self.texts += [(moved(path), read) for path, read in other.texts]
        self.left_out |= {moved(path): why for path, why in other.left_out.items()}
        self.notes += other.notes

    def leave_out(self, paths: Iterable[str], why: str) -> None:
        """Removes images, and adds a note with their number, the first of them and `why`."""
        if gone := set(paths):
            self.images = [(path, read) for path, read in self.images if path not in gone]
            self.left_out |= dict.fromkeys(sorted(gone), why)
            self.notes.append(f"left out {count_of(len(gone), 'image')} ({shown(sorted(gone))}): {why}")

    def extension(self, path: str) -> str:
        """Returns the extension of an image, by its name or its first bytes."""
        return self.kinds.get(path) or user_files.extension_of(path)

    def all_notes(self, *, advise: bool) -> list[str]:
        """Returns all notes; with `advise` also on tables and names of images that may hold labels."""
        ignored = sum(why == _NO_IMAGE for why in self.left_out.values())
        notes = [f"ignored {count_of(ignored, 'file')} (no images)"] * bool(ignored) + self.notes
        if self.kinds:
            count = count_of(len(self.kinds), "image")
            notes.append(f"read {count} by the first bytes, not by the name: {shown(self.kinds)}")
        if absent := [path for path, why in self.left_out.items() if why == _NOT_HERE]:
            notes.append(
                f"not downloaded: {count_of(len(absent), 'file')} in iCloud ({shown(absent)}); download "
                "the folder first"
            )
        if self.unread:
            dotted = {
                kind: f".{plain_text(kind)}" if kind else "without an extension" for kind in self.unread
            }
            counts = ", ".join(f"{count:,} {dotted[kind]}" for kind, count in sorted(self.unread.items()))
            notes.append(f"not read: {counts}")
            # Those that have their JPEG beside them need no conversion.
            stems = {path.rpartition(".")[0] for path, _ in self.images}
            paired = Counter(
                user_files.extension_of(p) for p in self.left_out if p.rpartition(".")[0] in stems
            )
            alone = {kind for kind, count in self.unread.items() if count > paired[kind]}
            for kinds, remedy in (
                (user_files.UNREAD_EXTENSIONS, "convert {} to JPEG first"),
                (user_files.CONVERTIBLE_EXTENSIONS, f"of {{}}, {user_files.EACH_IMAGE}"),
            ):
                if listed := ", ".join(dotted[kind] for kind in sorted(alone.intersection(kinds))):
                    notes[-1] += f"; {remedy.format(listed)}"
        if archives := [path for path in self.beside if not _is_table(path)]:
            parts = (
                path
                for path in archives
                if user_files.extension_of(path) not in user_files.ARCHIVE_EXTENSIONS
            )
            remedy = JOIN_PARTS if any(map(ARCHIVE_PART.search, parts)) else "unpack first"
            notes.append(f"left out {count_of(len(archives), 'archive')} ({shown(archives)}); {remedy}")
        if advise and (tables := self.tables()):
            notes.append(
                f"{shown(tables)} may contain labels, but a folder's labels are its subfolders (CLASS/*.jpg); give "
                "a CSV or TSV of paths and labels as the source, or with --labels"
            )
        if advise and (classes := self._classes_in_names()):
            notes.append(
                f"names of images may contain their classes ({shown(classes)}), which are not read; for labels, "
                "move the images into folders of these names"
            )
        return notes

    def tables(self) -> list[str]:
        """Returns the tables that may hold labels, without Kaggle's sample submissions, whose classes are made up."""
        return [path for path in self.beside if _is_table(path) and not is_sample(path)]

    def _classes_in_names(self) -> list[str]:
        """Returns the words before the numbers in a folder's file names, if there are several and each repeats."""
        folders: dict[str, list[str]] = defaultdict(list)
        for path, _ in self.images:
            folder, _, name = path.rpartition("/")
            match = _CLASS_IN_NAME.fullmatch(name)
            folders[folder].append(match[1] if match else "")
        counts = [Counter(names) for names in folders.values() if "" not in names]
        return sorted({name for count in counts if len(count) > 1 < min(count.values()) for name in count})


def _kind_by_head(path: str, read: Callable[..., bytes]) -> str | None:
    try:
        return user_files.image_kind(read(user_files.HEAD_BYTES))
    except (OSError, DecodeError) as error:
        raise_if_passing(path, error)
        return None


def _is_table(path: str) -> bool:
    return user_files.extension_of(path) in user_files.TABLE_EXTENSIONS


def is_sample(path: str) -> bool:
    """Whether a table's name is that of a sample submission."""
    return "submission" in path.rpartition("/")[2].lower()


def shown(paths: Iterable[str]) -> str:
    """Lists the first few paths, for messages."""
    shown = [plain_text(path) for path in islice(paths, _NAMED + 1)]
    return ", ".join(shown[:_NAMED]) + (", ..." if len(shown) > _NAMED else "")
