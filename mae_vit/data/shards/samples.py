"""The samples of one shard: a tar's members, grouped by key as webdataset groups them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from mae_vit.core.user_files import ARRAY_EXTENSIONS, IMAGE_EXTENSIONS
from mae_vit.data.shards.tar_headers import DamagedTar, walk_tar

# webdataset's own pattern (tariterators.base_plus_ext); files that it does not match
# belong to no sample, nor do those that webdataset takes for metadata.
_KEY = re.compile(r"^((?:.*/|)[^.]+)[.]([^/]*)$")
_METADATA = re.compile(r"__[^/]*__($|/)")
_MAX_IMAGE_BYTES = 2**31 - 1  # what the index's column holds
_MAX_LABEL_BYTES = 256
_NO_IMAGE = ("", -1, 0)
# Of a mask, beside its image.
MASK_EXTENSION = "seg.png"


@dataclass(frozen=True)
class Sample:
    """One image of a shard.

    Attributes:
        key: shared with its other members.
        extension: lower case, without the dot.
        offset: of its first byte in the tar.
        length: in bytes.
        label: what its `.cls` holds, None where there is none.
    """

    key: str
    extension: str
    offset: int
    length: int
    label: bytes | None


def split_key(name: str) -> tuple[str, str]:
    """Splits a member's path as webdataset does: all after the first dot of the basename is extension.

    A file that belongs to no sample has the key "".
    """
    found = None if _METADATA.match(name) else _KEY.match(name)
    return (found[1], found[2].lower()) if found else ("", "")


def read_samples(path: Path) -> Iterator[Sample]:
    """Yields the samples of a shard that hold an image, in order.

    Raises:
        DamagedTar: if the tar is damaged or holds two images under a key.
        OSError: if it cannot be read.
    """
    key, image, label = "", _NO_IMAGE, None
    with path.open("rb") as file:
        for member in walk_tar(path):
            member_key, extension = split_key(member.name)
            if not member_key:
                continue
            if member_key != key:
                if image is not _NO_IMAGE:
                    yield Sample(key, *image, label)
                key, image, label = member_key, _NO_IMAGE, None
            beside = extension in ARRAY_EXTENSIONS
            if beside and image is not _NO_IMAGE and image[0] in IMAGE_EXTENSIONS:
                continue  # an array beside a photograph is no image: features, a mask
            if beside or extension in IMAGE_EXTENSIONS:
                if image is not _NO_IMAGE and (beside or image[0] in IMAGE_EXTENSIONS):
                    raise DamagedTar(f"{path}: two images under the key {key}")
                if member.size > _MAX_IMAGE_BYTES:
                    raise DamagedTar(f"{path}: {member.name} has {member.size} bytes: no image is so large")
                image = (extension, member.offset, member.size)
            elif extension == "cls":
                label = os.pread(file.fileno(), min(member.size, _MAX_LABEL_BYTES), member.offset)
    if image is not _NO_IMAGE:
        yield Sample(key, *image, label)


def find_masks(path: Path) -> dict[str, tuple[int, int]]:
    """Lists the masks of a shard: offset and length, by key.

    Raises:
        DamagedTar: if the tar is damaged.
        OSError: if it cannot be read.
    """
    masks = {}
    for member in walk_tar(path):
        key, extension = split_key(member.name)
        if key and extension == MASK_EXTENSION:
            masks[key] = member.offset, member.size
    return masks


def images_of(path: Path, samples: Iterable[Sample]) -> Iterator[tuple[Sample, bytes]]:
    """Reads the images of samples of a shard, of all of which there is one.

    Raises:
        OSError: if it cannot be read.
    """
    with path.open("rb") as file:
        for sample in samples:
            yield sample, os.pread(file.fileno(), sample.length, sample.offset)


def class_number(path: Path, sample: Sample) -> int:
    """Returns a sample's class, -1 where it has none.

    Raises:
        DamagedTar: if its `.cls` is no class number.
    """
    if sample.label is None:
        return -1
    try:
        number = int(sample.label)
    except ValueError:
        number = -1
    if not 0 <= number < 2**31:
        raise DamagedTar(f"{path}: {sample.key}.cls is no class number: {sample.label[:32]!r}")
    return number
