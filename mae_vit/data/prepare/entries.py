"""From the paths of images to entries: split, class and key."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import PurePosixPath

from mae_vit.core.errors import InputError
from mae_vit.core.messages import count_of, plain_text
from mae_vit.core.user_files import (
    ARCHIVE_EXTENSIONS,
    ARRAY_EXTENSIONS,
    CONVERTIBLE_EXTENSIONS,
    IMAGE_EXTENSIONS,
    OTHER_EXTENSIONS,
    TABLE_EXTENSIONS,
    extension_of,
    full_extension,
    image_kind,
    is_hidden,
    is_image,
    placeholder_of,
    unread_photo,
)
from mae_vit.data.prepare.folder_names import NAME_ENCODING, Parts, level_note, place
from mae_vit.data.shards.dataset_json import Segmentation

_DRIVE = re.compile(r"^[A-Za-z]:")
# S2A_..._B8A.tif of Sentinel-2, LC08_..._B4.TIF of Landsat.
_BAND = re.compile(r"(.*[-_.])(?:B|band_?)\d{1,2}A?\.(?:tiff?|jp2|png)$", re.IGNORECASE)
_NAMED = 3
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

    def remarks(self) -> list[str]:
        """Lines on the files that are not among the images."""
        ignored = [f"ignored {count_of(self.ignored, 'file')} (no images)"] if self.ignored else []
        return [*ignored, *self.notes]

    def without_labels(self) -> ImageSource:
        """The same images with no class."""
        entries = [replace(entry, class_name=None) for entry in self.entries]
        return replace(self, entries=entries, classes=None)


@dataclass
class Listing:
    """The files of a folder or an archive.

    Attributes:
        images: path and reader of each image, by path.
        kinds: extensions of images whose names do not tell them.
        ignored: how many other files there are.
        unread: how many photographs there are in formats that are not decoded, by extension.
        unknown: how many files there are of other formats that may matter, by extension.
        absent: placeholders of files that a cloud keeps.
        beside: tables and archives among the other files.
        bare: folders of files that are no readable images.
        notes: remarks on skipped files.
    """

    images: list[tuple[str, Reader]] = field(default_factory=list)
    kinds: dict[str, str] = field(default_factory=dict)
    ignored: int = 0
    unread: Counter[str] = field(default_factory=Counter)
    unknown: Counter[str] = field(default_factory=Counter)
    absent: list[str] = field(default_factory=list)
    beside: list[str] = field(default_factory=list)
    bare: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)

    def takes(self, path: str, head: Callable[[], bytes]) -> bool:
        """Returns whether a file is an image, and counts it if not.

        Args:
            path: of the file.
            head: reads its first bytes, which decide where the name does not.
        """
        if is_image(path):
            return True
        if placeholder_of(path):
            self.absent.append(path)
            return False
        if is_hidden(path):
            self.ignored += 1
            return False
        kind, extension = unread_photo(path), extension_of(path)
        if kind is None and extension not in OTHER_EXTENSIONS:
            kind = image_kind(head())
        if kind in IMAGE_EXTENSIONS or kind in ARRAY_EXTENSIONS:
            self.kinds[path] = kind
            return True
        self.bare.add(path.rpartition("/")[0])
        if kind:
            self.unread[kind] += 1
        elif (full := full_extension(path)) in CONVERTIBLE_EXTENSIONS:
            self.unknown[full] += 1
        elif extension in (*TABLE_EXTENSIONS, *ARCHIVE_EXTENSIONS):
            self.ignored += 1
            self.beside.append(path)
        elif extension in OTHER_EXTENSIONS:
            self.ignored += 1
        else:
            self.unknown[extension] += 1
        return False

    def add(self, other: Listing, *, wrapping: str, place: str) -> None:
        """Adds the files of another listing, whose paths begin with `wrapping`, below the folder `place`."""

        def moved(path: str) -> str:
            return place + path.removeprefix(wrapping)

        self.images += [(moved(path), read) for path, read in other.images]
        self.kinds |= {moved(path): kind for path, kind in other.kinds.items()}
        self.ignored += other.ignored
        self.unread += other.unread
        self.unknown += other.unknown
        self.absent += map(moved, other.absent)
        self.beside += map(moved, other.beside)
        self.bare |= {moved(f"{path}/").removesuffix("/") for path in other.bare}
        self.notes += other.notes

    def extension(self, path: str) -> str:
        """Returns the extension of an image, by its name or its first bytes."""
        return self.kinds.get(path) or extension_of(path)

    def all_notes(self, *, labeled: bool) -> tuple[str, ...]:
        """Returns the remarks.

        Args:
            labeled: the images have labels; without, tables beside them may hold some.
        """
        notes = list(self.notes)
        if self.kinds:
            notes.append(
                f"took {count_of(len(self.kinds), 'image')} by the first bytes, since the names do not tell: "
                f"{shown(self.kinds)}"
            )
        if self.absent:
            notes.append(
                f"not downloaded: {count_of(len(self.absent), 'file')} that iCloud keeps ({shown(self.absent)}): "
                "download the folder first"
            )
        if self.unknown:
            notes.append(_not_read(self.unknown))
        if archives := [path for path in self.beside if extension_of(path) in ARCHIVE_EXTENSIONS]:
            notes.append(f"left out {count_of(len(archives), 'archive')} ({shown(archives)}): unpack first")
        if (
            tables := [path for path in self.beside if extension_of(path) in TABLE_EXTENSIONS]
        ) and not labeled:
            notes.append(
                f"{shown(tables)} may hold labels, but the labels of a folder are its folders (CLASS/*.jpg); a CSV or "
                "TSV of paths and labels is a source itself: give it in place of the folder"
            )
        if self.unread:
            counts = ", ".join(f"{count:,} .{extension}" for extension, count in sorted(self.unread.items()))
            photos = count_of(self.unread.total(), "photograph")
            notes.append(
                f"left out {photos} in a format that cannot be read ({counts}): convert to JPEG first"
            )
        return tuple(notes)


def _not_read(unknown: Counter[str]) -> str:
    counts = ", ".join(f"{count:,} {_dotted(kind)}" for kind, count in sorted(unknown.items()))
    convert = sorted(unknown.keys() & CONVERTIBLE_EXTENSIONS)
    remedy = f"; images in {', '.join(map(_dotted, convert))} are to be converted to PNG or TIFF first"
    if "arrow" in convert:
        remedy += '; datasets.load_from_disk(FOLDER)["train"].to_parquet("train.parquet") writes what is read'
    return f"not read: {counts}{remedy if convert else ''}"


def _dotted(extension: str) -> str:
    return f".{plain_text(extension)}" if extension else "without an extension"


def shown(paths: Iterable[str]) -> str:
    """Lists the first few paths, for messages."""
    shown = [plain_text(path) for path in islice(paths, _NAMED + 1)]
    return ", ".join(shown[:_NAMED]) + (", ..." if len(shown) > _NAMED else "")


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
    _leave_out_arrays(files)
    _leave_out_doubled(files, PurePosixPath(name).name.partition(".")[0])
    _note_bands(files)
    paths = [tuple(path.split("/")) for path, _ in files.images]
    level = class_folder if labels else "first"
    placed = place(paths, split, where=where, class_folder=level)
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
    notes = files.all_notes(labeled=any(entry.class_name is not None for entry in entries))
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


def _leave_out_arrays(files: Listing) -> None:
    """Takes arrays beside photographs for what belongs to them, as webdataset does: features, masks, depth."""

    def is_array(path: str) -> bool:
        return files.extension(path) in ARRAY_EXTENSIONS

    arrays = sum(is_array(path) for path, _ in files.images)
    if not 0 < arrays < len(files.images):
        return
    files.images = [(path, read) for path, read in files.images if not is_array(path)]
    files.ignored += arrays
    files.notes.append(f"left out {arrays} .npy, .npz or .dcm files beside images of other formats")


def _leave_out_doubled(files: Listing, top: str) -> None:
    """Leaves out a copy of a folder that lies in it under its own name, as in chest_xray/chest_xray/train/..."""
    paths = {(top, *path.split("/")) for path, _ in files.images}
    twins: dict[Parts, list[bool]] = {}
    copies: dict[str, list[Parts]] = {}
    for parts in paths:
        for at in range(len(parts) - 2):
            if parts[at] == parts[at + 1]:
                twins.setdefault(parts[: at + 2], []).append(parts[:at] + parts[at + 1 :] in paths)
                copies.setdefault("/".join(parts[1:]), []).append(parts[: at + 2])
    left_out = {
        path: "/".join(folder[1:])
        for path, folders in copies.items()
        for folder in folders
        if all(twins[folder])
    }
    if left_out:
        files.images = [(path, read) for path, read in files.images if path not in left_out]
        files.notes.append(
            f"left out {count_of(len(left_out), 'image')} of {shown(sorted(set(left_out.values())))}: the folder "
            "around it holds images of the same names"
        )


def _note_bands(files: Listing) -> None:
    """Says if images are by their names the bands of fewer images."""
    bands: dict[str, list[str]] = {}
    for path, _ in files.images:
        if found := _BAND.match(path):
            bands.setdefault(found[1], []).append(path)
    several = [paths for paths in bands.values() if len(paths) > 1]
    if several and 2 * sum(map(len, several)) > len(files.images):
        files.notes.append(
            f"warning: {shown(several[0])} are by their names bands of one image, and each was taken for an image of "
            "its own: stack the bands of each image in one .tif first"
        )


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
            f'"{own}" do: move it, or --no-labels'
        )
    return set(flat)
