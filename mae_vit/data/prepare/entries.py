"""Images of a source: what `prepare` reads, and how the user says that it is to be read."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from mae_vit.core.errors import InputError
from mae_vit.core.messages import count_of, plain_text
from mae_vit.data.shards.dataset_json import Segmentation

_DRIVE = re.compile(r"^[A-Za-z]:")
_PARENT = re.compile(r"(^|[/\\])\.\.($|[/\\])")
# A stranger's number must not make us write a list of billions of classes.
_MAX_CLASSES = 1_000_000
Reader = Callable[[], bytes]


@dataclass(frozen=True)
class SourceOptions:
    """How sources are read.

    Attributes:
        out: the output folder, where temporary files go.
        split: split of images outside of split folders.
        root: where torchvision keeps, or puts, its download.
        labels: class folders, columns and members of labels are read; False ignores them.
        image_column: column of images, of paths in a table, or field of a shard; None for the one that is there.
        label_column: the same of labels; None for the one that is there, if any.
        config_name: configuration of a data set of the Hub that has several.
        overwrite: False refuses splits that exist before anything is read for long.
        class_folder: "first" (below the split) or "last" (that holds the image) is the class, and names that may
            be splits or classes are classes; None asks where it matters.
        name_encoding: encoding of names in archives; None for UTF-8.
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
    name_encoding: str | None = None


@dataclass(frozen=True, slots=True)
class Entry:
    """One image of a source.

    Attributes:
        split: "train", "val" or "test" (or the name given with --split).
        class_name: its label, None without one.
        key: its name in the shards, unique within a split.
        path: its path in the source.
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
        name: name in messages and `dataset.json`, without paths of this machine.
        entries: all images.
        classes: all class names, where the source gives them an order.
        notes: remarks on files that are not among the images.
        segmentation: the classes of the images' masks; None without masks.
    """

    name: str
    entries: Sequence[Entry]
    classes: tuple[str, ...] | None = None
    notes: tuple[str, ...] = ()
    segmentation: Segmentation | None = None


def safe_member_path(name: str, where: str) -> str:
    """Returns an archive member's path in plain form.

    Raises:
        InputError: if it would leave the folder that the archive is unpacked in.
    """
    if name.startswith(("/", "\\")) or _DRIVE.match(name) or (".." in name and _PARENT.search(name)):
        remedy = ": unpack it, and pack it without absolute names (tar without -P)" if name[0] == "/" else ""
        raise InputError(f'archive {where} holds the path "{name}", which leaves its folder: refused{remedy}')
    return str(PurePosixPath(name))


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


def class_text(label: str) -> str:
    """Returns a class's name: one name has several spellings in Unicode, as macOS writes another than Linux."""
    return plain_text(unicodedata.normalize("NFC", label))


def numbered_classes(largest: int, where: str) -> tuple[str, ...]:
    """Names classes 0..largest of a source that gives them numbers alone; none if `largest` is negative.

    Raises:
        InputError: if the number is out of all proportion.
    """
    if largest >= _MAX_CLASSES:
        raise InputError(f"{where}: a label says class {largest}; at most {_MAX_CLASSES} are taken")
    return tuple(str(number) for number in range(largest + 1))


def without_label_note(count: int, reason: str) -> list[str]:
    """Says of how many images there is no label, and why."""
    return [f"{count_of(count, 'image')} without a label: {reason}"] if count else []
