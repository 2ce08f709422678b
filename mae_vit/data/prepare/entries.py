"""From the paths of images to entries: split, class and key."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePosixPath

from mae_vit.core.errors import InputError
from mae_vit.core.messages import count_of, plain_text
from mae_vit.data.prepare.folder_names import NAME_ENCODING, Parts, level_note, place
from mae_vit.data.prepare.label_lists import labels_beside
from mae_vit.data.prepare.listing import Listing, Reader, leave_out, shown
from mae_vit.data.shards.dataset_json import Segmentation

_DRIVE = re.compile(r"^[A-Za-z]:")
_PARENT = re.compile(r"(^|[/\\])\.\.($|[/\\])")


@dataclass(frozen=True, slots=True)
class Entry:
    """One image of a source.

    Attributes:
        split: "train", "val" or "test" (or the name given with --split).
        class_name: its label, None without one.
        key: its name in the shards, unique within a split.
        path: in the source.
        extension: lower case, without the dot.
        read: returns the encoded bytes; raises OSError or DecodeError.
        read_mask: the same for its mask; None without one.
    """

    split: str
    class_name: str | None
    key: str
    path: str
    extension: str
    read: Reader
    read_mask: Reader | None = None


@dataclass(frozen=True)
class ImageSource:
    """The images of one source, in a fixed order, read at random.

    Attributes:
        name: for messages and `dataset.json`, without paths of this machine.
        entries: all images.
        ignored: files that are no images.
        classes: all class names, where the source gives them an order.
        notes: remarks on other skipped files.
        discard: removes what reading needed; called when all is prepared.
        segmentation: the classes of the images' masks; None without masks.
    """

    name: str
    entries: Sequence[Entry]
    ignored: int = 0
    classes: tuple[str, ...] | None = None
    notes: tuple[str, ...] = ()
    discard: Callable[[], None] = lambda: None
    segmentation: Segmentation | None = None

    def remarks(self) -> list[str]:
        """Lines on the files that are not among the images."""
        ignored = [f"ignored {count_of(self.ignored, 'file')} (no images)"] if self.ignored else []
        return [*ignored, *self.notes]

    def without_labels(self) -> ImageSource:
        """The same images with no class."""
        entries = [replace(entry, class_name=None) for entry in self.entries]
        return replace(self, entries=entries, classes=None)


def safe_member_path(name: str, where: str) -> str:
    """Returns an archive member's path in plain form.

    Raises:
        InputError: if it would leave the folder that the archive is unpacked in.
    """
    if name.startswith(("/", "\\")) or _DRIVE.match(name) or (".." in name and _PARENT.search(name)):
        raise InputError(
            f'archive {where} holds the path "{plain_text(name)}", which leaves its folder: refused'
            + (
                ": unpack it, and pack it without absolute names (tar without -P)"
                if name.startswith("/")
                else ""
            )
        )
    return str(PurePosixPath(name))


def entries_from_paths(
    files: Listing,
    split: str,
    *,
    where: str,
    name: str,
    labels: bool,
    wrapped: bool = False,
    class_folder: str | None = None,
) -> ImageSource:
    """Reads split and class off paths: [SPLIT/][CLASS/].../file below one common top.

    Args:
        files: of the source.
        split: of images outside of split folders.
        where: names the source in errors.
        name: names it in `dataset.json`.
        labels: folders are classes; False takes all images without.
        wrapped: one folder around all files is the archive's wrapping, no class.
        class_folder: as in `FolderNames`.

    Raises:
        InputError: if some images of a split lie in class folders and some do not, or a
            class has no proper name.
    """
    leave_out(files, PurePosixPath(name).name.partition(".")[0], companions=class_folder is None)
    paths = [tuple(path.split("/")) for path, _ in files.images]
    level = class_folder if labels else "first"
    try:
        placed = place(paths, split, where=where, class_folder=level)
    except InputError as error:
        tables = files.tables() if labels else []
        raise InputError(
            f"{error}; {shown(tables)} may hold labels: give a table in place of the folder"
            if tables
            else str(error)
        ) from None
    folders = {parts[0] if len(parts) > 1 else None for _, parts in placed}
    if wrapped and len(folders) == 1 and {own for own, _ in placed} == {split}:
        below = [parts[1:] for _, parts in placed]
        if None in folders or all(len(parts) == 1 for parts in below):
            placed, labels = [(split, below[n] or parts) for n, (_, parts) in enumerate(placed)], False
        else:  # the wrapping holds class folders, and a picture beside them
            placed = place(below, split, where=where, class_folder=level)
    flat = _flat_splits(placed, where) if labels else {own for own, _ in placed}
    keys: dict[str, dict[str, int]] = {}
    entries = []
    for (own, parts), (path, read) in zip(placed, files.images, strict=True):
        stem = parts[-1].rpartition(".")[0] or parts[-1]
        if own in flat:
            class_name = None
            base = "/".join([*parts[:-1], stem.replace(".", "_")])
        else:
            # One name has several spellings in Unicode: macOS writes another than Linux and Windows.
            class_name = unicodedata.normalize("NFC", parts[0])
            # Names that are no UTF-8 reach Python as surrogates, which JSON refuses.
            if (plain := plain_text(class_name)) != class_name:
                encoding = "\\x" in plain
                why = (
                    f"is not named in UTF-8: {NAME_ENCODING}"
                    if encoding
                    else "has an unprintable name: rename it"
                )
                raise InputError(f"{where}: the class folder {plain} {why}")
            base = f"{class_name}/{'_'.join([*parts[1:-1], stem]).replace('.', '_')}"
        key = unique_key(base, keys.setdefault(own, {}))
        entries.append(Entry(own, class_name, key, path, files.extension(path), read))
    told, listed = dict[str, str](), list[str]()
    if labels:
        classes = {entry.class_name for entry in entries if entry.class_name is not None}
        told, listed = labels_beside([e.path for e in entries if e.class_name is None], classes, files.texts)
    if told:
        entries = [replace(e, class_name=told.get(e.path, e.class_name)) for e in entries]
    notes = files.all_notes(labeled=any(entry.class_name is not None for entry in entries)) + tuple(listed)
    notes += tuple(level_note([(own, parts) for own, parts in placed if own not in flat], class_folder))
    if without := _without_images(files.bare, paths, placed, flat):
        count = count_of(len(without), "folder")
        notes += (f"{count} beside the classes without a readable image, so no class: {shown(without)}",)
    return ImageSource(name, entries, files.ignored, notes=notes)


def _without_images(
    bare: set[str], paths: Sequence[Parts], placed: Sequence[tuple[str, Parts]], flat: set[str]
) -> list[str]:
    """The folders that lie where classes lie, and hold no image."""
    classes = {
        path[: path.index(parts[0]) + 1]
        for path, (own, parts) in zip(paths, placed, strict=True)
        if own not in flat
    }
    among = {folder[:-1] for folder in classes}
    found = {
        parts[:depth]
        for parts in (tuple(folder.split("/")) for folder in bare if folder)
        for depth in range(1, len(parts) + 1)
        if parts[: depth - 1] in among
    }
    return sorted("/".join(folder) for folder in found - classes if folder not in among)


def unique_key(name: str, taken: dict[str, int]) -> str:
    """Makes a key that webdataset reads as one, and no other sample has.

    Args:
        name: what it is made from.
        taken: the keys so far, each with the number that the next one like it tries first;
            changed in place.
    """
    base = plain_text(name)
    # webdataset takes members named __so__ for metadata.
    base = f"x{base}" if base.startswith("__") else base
    key, number = base, taken.get(base, 2)
    while key in taken:
        key = f"{base}_{number}"
        number += 1
    taken[base] = number
    taken.setdefault(key, 2)
    return key


def _flat_splits(placed: Sequence[tuple[str, tuple[str, ...]]], where: str) -> set[str]:
    """The splits whose images lie in no class folder."""
    classed = {own for own, parts in placed if len(parts) > 1}
    flat: dict[str, str] = {}
    for own, parts in placed:
        if len(parts) == 1:
            flat.setdefault(own, parts[0])
    for own in sorted(classed & set(flat)):
        raise InputError(
            f'{where}: the image "{plain_text(flat[own])}" lies in no class folder, while others of split '
            f'"{own}" do: move it, or mae-vit prepare --no-labels'
        )
    return set(flat)
