"""The images of a source that `prepare` reads, and the options for reading them."""

from __future__ import annotations

import errno
import hashlib
import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from mae_vit.core.errors import InputError
from mae_vit.core.messages import count_of, error_reason, plain_text
from mae_vit.core.progress import progress
from mae_vit.data.images.bounds import DecodeError
from mae_vit.data.shards.dataset_json import Dataset, Segmentation
from mae_vit.data.shards.samples import label_number

_DRIVE = re.compile(r"^[A-Za-z]:")
# ['cat'], as pandas writes lists.
_LIST_OF_ONE = re.compile(r"""^\[\s*(['"])([^'"]*)\1\s*\]$""")
_PARENT = re.compile(r"(^|[/\\])\.\.($|[/\\])")
# An untrusted number must not lead to a list of billions of classes.
_MAX_CLASSES = 1_000_000
Reader = Callable[[], bytes]
# Errors of one file, its name or an offset in it; a decompressor's have no number. Others are of the machine or the
# network, and may pass.
_OF_ONE_FILE = (
    None, errno.ENOENT, errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG,
    errno.ENXIO, errno.EINVAL, errno.EILSEQ,
)  # fmt: skip


@dataclass(frozen=True)
class SourceOptions:
    """How sources are read.

    Attributes:
        out: output folder, which also holds temporary files.
        split: split of images outside split folders.
        root: folder of torchvision's downloads.
        labels: read labels from class folders, columns and members.
        image_column: column of images (in a table, of paths) or field of a shard; None for the only one.
        label_column: column or field of labels; None for the only one, if any.
        config_name: configuration of a Hub data set that has several.
        overwrite: False rejects existing splits, before a long read.
        class_folder: the folder that is the class, "first" (below the split) or "last" (holds the image), even if its
            name may be a split; None rejects ambiguous names.
    """

    out: Path
    split: str = "train"
    root: Path | None = None
    labels: bool = True
    image_column: str | None = None
    label_column: str | None = None
    config_name: str | None = None
    overwrite: bool = True
    class_folder: str | None = None


@dataclass(frozen=True, slots=True)
class Entry:
    """One image of a source.

    Attributes:
        split: "train", "val" or "test" (or the name given with --split).
        class_name: the label; None without one.
        key: name in the shards, unique within a split.
        path: path in the source.
        extension: extension in lower case, without the dot.
        read: returns the encoded bytes; raises OSError, DecodeError or InputError.
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
    """The images of one source, in a fixed order, with random access.

    Attributes:
        name: name in messages and `dataset.json`, without paths of this machine.
        entries: all images.
        classes: all class names, if the source orders them.
        notes: remarks on files that are not among the images.
        left_out: why each of these files is not.
        segmentation: the classes of the images' masks.
        described: the description of shards of ours, if the source is such.
        has_columns: False for files, whose labels are folders.
    """

    name: str
    entries: Sequence[Entry]
    classes: tuple[str, ...] | None = None
    notes: tuple[str, ...] = ()
    segmentation: Segmentation | None = None
    left_out: Mapping[str, str] = field(default_factory=dict)
    described: Dataset | None = None
    has_columns: bool = True


def safe_member_path(name: str, where: str) -> str:
    """Returns an archive member's path in plain form.

    Raises:
        InputError: if it would leave the folder that the archive is unpacked in.
    """
    if name.startswith(("/", "\\")) or _DRIVE.match(name) or (".." in name and _PARENT.search(name)):
        remedy = "; pack it without absolute names (tar without -P)" if name[0] == "/" else ""
        raise InputError(f'archive {where} is refused: its path "{name}" leaves its folder{remedy}')
    return str(PurePosixPath(name))


def raise_if_passing(path: str, error: Exception) -> None:
    """Raises InputError for an error that may pass: without the image, the data set would stay smaller for good."""
    if isinstance(error, OSError) and error.errno not in _OF_ONE_FILE:
        raise InputError(
            f"{path} cannot be read: {error_reason(error)}; prepare again, or remove the file if it stays so"
        ) from None


def digests_of(entries: Sequence[Entry], name: str) -> list[bytes | None]:
    """Returns a hash of each image's bytes; None if it cannot be read, which is reported when it is converted."""
    bar = progress(entries, desc=f"comparing {name}", unit=" images", delay=2, leave=False)
    return list(map(_digest, bar))


def _digest(entry: Entry) -> bytes | None:
    try:
        data = entry.read()
        return hashlib.sha256(data).digest() if data else None  # empty files are no copies
    except (DecodeError, OSError) as error:
        raise_if_passing(entry.path, error)
        return None


def unique_key(name: str, taken: dict[str, int]) -> str:
    """Makes a key that is valid for webdataset and that no other sample has.

    `taken` has the keys so far, each with the number to try first for the next equal name; it is changed in place.
    """
    base = plain_text(name)
    # webdataset takes names that begin with __ for metadata.
    base = f"x{base}" if base.startswith("__") else base
    key, number = base, taken.get(base, 2)
    while key in taken:
        key = f"{base}_{number}"
        number += 1
    taken[base] = number
    taken.setdefault(key, 2)
    return key


def composed(text: str) -> str:
    """Returns a text in Unicode's form NFC, since macOS and Linux encode the same name differently."""
    return unicodedata.normalize("NFC", text)


def class_text(label: str) -> str:
    """Returns a class's name as it is written."""
    return plain_text(composed(label))


def classes_of_cells(cells: Iterable[str]) -> dict[str, str | None]:
    """Returns the class of each cell in a column; numbers lose pandas' decimals, and negative ones are no classes.

    1 and -1 are classes if all cells have one of them.
    """
    names = {cell: class_text(_LIST_OF_ONE.sub(r"\2", cell)) for cell in cells}
    numbers = {cell: label_number(name.encode()) for cell, name in names.items()}
    if set(numbers.values()) != {-1, 1}:
        names |= {cell: "" for cell, number in numbers.items() if number is not None and number < 0}
    return {
        cell: (name if numbers[cell] is None else name.partition(".")[0]) or None
        for cell, name in names.items()
    }


def ordered_classes(entries: Iterable[Entry]) -> tuple[str, ...] | None:
    """Returns classes that are numbers in numeric order, as for other sources; None for words, which are sorted."""
    names = {entry.class_name for entry in entries if entry.class_name is not None}
    numbers = {name: label_number(name.encode()) for name in names}
    words = None in numbers.values()
    return None if words else tuple(sorted(numbers, key=lambda name: (numbers[name] or 0, name))) or None


def numbered_classes(largest: int, where: str) -> tuple[str, ...]:
    """Names classes 0..largest of a source that only numbers them; none if `largest` is negative.

    Raises:
        InputError: if the number is implausibly large.
    """
    if largest >= _MAX_CLASSES:
        raise InputError(f"{where}: label class {largest} is too large; the limit is {_MAX_CLASSES} classes")
    return tuple(str(number) for number in range(largest + 1))


def without_label_note(count: int, reason: str) -> list[str]:
    """Returns a note on the number of images without a label, and the reason."""
    return [f"{count_of(count, 'image')} without a label: {reason}"] if count else []
