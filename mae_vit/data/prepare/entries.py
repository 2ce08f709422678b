"""From the paths of images to entries: split, class and key."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath

from mae_vit.core.errors import InputError
from mae_vit.core.messages import count_of, plain_text
from mae_vit.core.user_files import is_array, split_named, unread_photo
from mae_vit.data.shards.dataset_json import Segmentation

_DRIVE = re.compile(r"^[A-Za-z]:")
_PARENT = re.compile(r"(^|[/\\])\.\.($|[/\\])")
Reader = Callable[[], bytes]


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

    def without_labels(self) -> ImageSource:
        """The same images with no class."""
        entries = [replace(entry, class_name=None) for entry in self.entries]
        return replace(self, entries=entries, classes=None)


@dataclass
class Listing:
    """The files of a folder or an archive.

    Attributes:
        images: path and reader of each image, by path.
        ignored: how many other files there are.
        unread: how many photographs there are in formats that are not decoded, by extension.
        notes: remarks on skipped files.
    """

    images: list[tuple[str, Reader]] = field(default_factory=list)
    ignored: int = 0
    unread: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)

    def leave_out(self, path: str) -> None:
        """Counts a file that is no image."""
        if extension := unread_photo(path):
            self.unread[extension] += 1
        else:
            self.ignored += 1

    def all_notes(self) -> tuple[str, ...]:
        """Returns the remarks, with one on the photographs in formats that are not decoded."""
        if not self.unread:
            return tuple(self.notes)
        counts = ", ".join(f"{count:,} .{extension}" for extension, count in sorted(self.unread.items()))
        photos = count_of(self.unread.total(), "photograph")
        return (
            *self.notes,
            f"left out {photos} in a format that cannot be read ({counts}): convert to JPEG first",
        )


def safe_member_path(name: str, where: str) -> str:
    """Returns an archive member's path in plain form.

    Raises:
        InputError: if it would leave the folder that the archive is unpacked in.
    """
    if name.startswith(("/", "\\")) or _DRIVE.match(name) or (".." in name and _PARENT.search(name)):
        raise InputError(
            f'archive {where} holds the path "{plain_text(name)}", which leaves its folder: refused'
        )
    return str(PurePosixPath(name))


def entries_from_paths(
    files: Listing, split: str, *, where: str, name: str, labels: bool, wrapped: bool = False
) -> ImageSource:
    """Reads split and class off paths: [SPLIT/][CLASS/].../file below one common top.

    Args:
        files: of the source.
        split: of images outside of split folders.
        where: names the source in errors.
        name: names it in `dataset.json`.
        labels: folders are classes; False takes all images without.
        wrapped: one folder around all files is the archive's wrapping, no class.

    Raises:
        InputError: if some images of a split lie in class folders and some do not, or a
            class has no proper name.
    """
    _leave_out_arrays(files)
    placed = _split_off([tuple(path.split("/")) for path, _ in files.images], split)
    folders = {parts[0] if len(parts) > 1 else None for _, parts in placed}
    if wrapped and len(folders) == 1 and {own for own, _ in placed} == {split}:
        if None not in folders:
            placed = [(own, parts[1:]) for own, parts in placed]
        labels = False
    flat = _flat_splits(placed, where) if labels else {own for own, _ in placed}
    keys: dict[str, dict[str, int]] = {}
    entries = []
    for (own, parts), (path, read) in zip(placed, files.images, strict=True):
        stem, _, extension = parts[-1].rpartition(".")
        if own in flat:
            class_name = None
            base = "/".join([*parts[:-1], stem.replace(".", "_")])
        else:
            class_name = parts[0]
            # Names that are no UTF-8 reach Python as surrogates, which JSON refuses.
            if plain_text(class_name) != class_name:
                raise InputError(f"{where}: the class folder {plain_text(class_name)} is not named in UTF-8")
            base = f"{class_name}/{'_'.join([*parts[1:-1], stem]).replace('.', '_')}"
        key = unique_key(base, keys.setdefault(own, {}))
        entries.append(Entry(own, class_name, key, path, extension.lower(), read))
    return ImageSource(name, entries, files.ignored, notes=files.all_notes())


def _leave_out_arrays(files: Listing) -> None:
    """Takes arrays beside photographs for what belongs to them, as webdataset does: features, masks, depth."""
    arrays = sum(is_array(path) for path, _ in files.images)
    if not 0 < arrays < len(files.images):
        return
    files.images = [(path, read) for path, read in files.images if not is_array(path)]
    files.ignored += arrays
    files.notes.append(f"left out {arrays} .npy, .npz or .dcm files beside images of other formats")


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


def _split_off(paths: Sequence[tuple[str, ...]], split: str) -> list[tuple[str, tuple[str, ...]]]:
    """Takes the common top and the split folder off each path."""
    top = _common_top(paths)
    placed = []
    for path in paths:
        parts = path[top:]
        own = split_named(parts[0]) if len(parts) > 1 else None
        placed.append((own, parts[1:]) if own else (split, parts))
    return placed


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
            f'"{own}" do: move it, or --no-labels'
        )
    return set(flat)


def _common_top(paths: Sequence[Sequence[str]]) -> int:
    """How many leading folders all paths share that are neither split nor class."""
    top = 0
    while (
        paths
        and all(len(parts) >= top + 3 and parts[top] == paths[0][top] for parts in paths)
        and not split_named(paths[0][top])
    ):
        top += 1
    return top
