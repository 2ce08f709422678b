"""The samples of one shard: a tar's members, grouped by key as webdataset groups them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mae_vit.core.messages import plain_text
from mae_vit.core.user_files import ARRAY_EXTENSIONS, IMAGE_EXTENSIONS
from mae_vit.data.shards.tar_headers import DamagedTar, Tar, walk_tar

# webdataset's own pattern (tariterators.base_plus_ext). Files that do not match it, and those that webdataset takes for
# metadata, belong to no sample; nor do hidden files, which it takes for samples with the key of their folder.
_KEY = re.compile(r"^((?:.*/|)[^.]*[^./])[.]([^/]*)$")
_METADATA = re.compile(r"__[^/]*__($|/)")
_MAX_IMAGE_BYTES = 2**31 - 1  # what the index's column holds
_MAX_LABEL_BYTES = 256
_NO_LABEL = re.compile(
    rb"""[\[(]\s*([-+\d.'"].*)?[\])]|\{.*:.*\}|tensor\(.*|[-+]?\d*\.\d*[1-9]\d*(e[-+]?\d+)?|\d+([,; ]+\d+)+""",
    re.DOTALL,
)
_CONTROL = re.compile(rb"[\0-\x08\x0e-\x1f]")
# Extension of a mask beside its image.
MASK_EXTENSION = "seg.png"


@dataclass(frozen=True, slots=True)
class ShardImage:
    """One image of a shard, with the content of its `.cls`, if there is one.

    `field` is webdataset's name for the image: all after the first dot of its file name, in lower case. Other members
    share the key.
    """

    key: str
    field: str
    offset: int
    length: int
    label: bytes | None

    @property
    def extension(self) -> str:
        """Extension of the image, in lower case, without the dot."""
        return self.field.rpartition(".")[2]

    @property
    def name(self) -> str:
        """Name of its member in the tar."""
        return f"{self.key}.{self.field}"


@dataclass(slots=True)
class Group:
    """The members that share a key: offset and size of each by its field, as of `ShardImage`."""

    key: str
    fields: dict[str, tuple[int, int]]

    def image(self, shard: Path, asked: str | None = None) -> str | None:
        """Returns the field of the sample's image, or of the one that the user `asked` for; None without one.

        Raises:
            DamagedTar: if several fields could be the image.
        """
        if asked is not None:
            return asked if asked in self.fields else None
        images = [field for field in self.fields if is_image_field(field)]
        # Arrays beside a photograph are not images but features or masks.
        images = images or [field for field in self.fields if field in ARRAY_EXTENSIONS]
        plain = [field for field in images if "." not in field] if len(images) > 1 else images
        if len(plain) > 1 or (images and not plain):
            raise DamagedTar(f"{shard}: {_several(self.key, images)}")
        return plain[0] if plain else None


def _several(key: str, images: list[str]) -> str:
    count = "two images" if len(images) == 2 else f"{len(images)} images"
    listed = ", ".join(images[:4]) + (", ..." if len(images) > 4 else "")
    # cat.0.jpg, cat.1.jpg: file names with dots, not the members of one sample.
    numbered = all(field.partition(".")[0].isdigit() for field in images)
    dots = "a key ends at the first dot, so rename the files without further dots, or " if numbered else ""
    found = f"{count} under the key {plain_text(key)} ({plain_text(listed)})"
    return f"{found}; {dots}choose one of each with `mae-vit prepare SRC OUT --image-column NAME`"


def is_image_field(field: str) -> bool:
    """Whether a member with this field is a photograph, not a mask."""
    return field != MASK_EXTENSION and field.rpartition(".")[2] in IMAGE_EXTENSIONS


def split_key(name: str) -> tuple[str, str]:
    """Splits a member's path as webdataset does: all after the first dot of the basename is the extension.

    A file that belongs to no sample has the key "".
    """
    found = None if _METADATA.match(name) else _KEY.match(name)
    return (found[1], found[2].lower()) if found else ("", "")


def read_groups(
    tar: Path | Tar,
    others: list[str] | None = None,
    asked: str | None = None,
    lost: list[str] | None = None,
) -> list[Group]:
    """Lists the samples of a shard as webdataset groups them: adjacent members with the same key.

    Members elsewhere with the same key, but without an image beside them, belong to the sample too. Links are followed
    if `others` is given, as by `walk_tar`. `asked` is the field that the user has named as the image; `lost` receives
    the keys of members that belong to no image.

    Raises:
        DamagedTar: if the tar is damaged or holds an image twice under a key.
        OSError: if it cannot be read.
    """
    groups: list[Group] = []
    for member in walk_tar(tar, others):
        key, field = split_key(member.name)
        if not key:
            continue
        if not groups or groups[-1].key != key:
            groups.append(Group(key, {}))
        if is_image_field(field) and field in groups[-1].fields:
            raise DamagedTar(f"{tar.name if isinstance(tar, Tar) else tar}: {_several(key, [field, field])}")
        groups[-1].fields[field] = member.offset, member.size
    loose: dict[str, dict[str, tuple[int, int]]] = {}
    samples = []
    for group in groups:
        if any(is_image_field(field) or field in (*ARRAY_EXTENSIONS, asked) for field in group.fields):
            samples.append(group)
        else:
            loose.setdefault(group.key, {}).update(group.fields)
    if lost is not None:
        lost += loose.keys() - {group.key for group in samples}
    for group in samples if loose else ():
        group.fields = loose.get(group.key, {}) | group.fields
    return samples


def read_samples(path: Path) -> Iterator[ShardImage]:
    """Yields the samples of a shard that hold an image, in order.

    Raises:
        DamagedTar: if the tar is damaged or holds two images under a key.
        OSError: if it cannot be read.
    """
    with path.open("rb") as file:
        for group in read_groups(path):
            if field := group.image(path):
                offset, size = group.fields[field]
                if size > _MAX_IMAGE_BYTES:
                    raise DamagedTar(f"{path}: {group.key}.{field} has {size} bytes, too large for an image")
                label = group.fields.get("cls")
                yield ShardImage(group.key, field, offset, size, label and read_label(file.fileno(), *label))


def read_label(descriptor: int, offset: int, size: int) -> bytes:
    """Reads the content of a member that holds a label."""
    return os.pread(descriptor, min(size, _MAX_LABEL_BYTES), offset).removeprefix(b"\xef\xbb\xbf").strip()


def find_masks(path: Path) -> dict[str, tuple[int, int]]:
    """Lists the masks of a shard: offset and length, by key. Raises the errors of `read_groups`."""
    groups = read_groups(path)
    return {group.key: group.fields[MASK_EXTENSION] for group in groups if MASK_EXTENSION in group.fields}


def class_number(path: Path, sample: ShardImage) -> int:
    """Returns a sample's class, -1 where it has none or a negative one.

    Raises:
        DamagedTar: if its `.cls` is not a class number.
    """
    if sample.label is None:
        return -1
    number = label_number(sample.label)
    if number is None:
        raise DamagedTar(f"{path}: {sample.key}.cls is not a class number: {sample.label[:32]!r}")
    return max(number, -1)


def label_number(label: bytes) -> int | None:
    """Returns the class number that a label holds, "2" or "2.0"; None for words."""
    found = re.fullmatch(rb"([+-]?[0-9]{1,9})(\.0*)?", label)
    return int(found[1]) if found else None


def no_single_label(label: bytes) -> bool:
    """Whether a label is neither a number nor a name: a list, a fraction, an array as Python prints or stores it."""
    return bool(_NO_LABEL.fullmatch(label) or _CONTROL.search(label))
