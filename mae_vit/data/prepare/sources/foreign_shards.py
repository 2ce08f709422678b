"""Shards made by others: tars of KEY.jpg, KEY.cls, KEY.json, without `dataset.json`."""

from __future__ import annotations

import json
import re
import unicodedata
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from mae_vit.core.errors import InputError
from mae_vit.core.messages import count_of, plain_text
from mae_vit.core.user_files import (
    ARRAY_EXTENSIONS,
    HEAD_BYTES,
    IMAGE_EXTENSIONS,
    OTHER_EXTENSIONS,
    image_kind,
    is_hidden,
    split_named,
)
from mae_vit.data.images.decode import check_bytes
from mae_vit.data.prepare.entries import Entry, ImageSource, safe_member_path, unique_key
from mae_vit.data.prepare.listing import shown
from mae_vit.data.prepare.sources.archives import is_tar
from mae_vit.data.prepare.sources.folders import walk
from mae_vit.data.prepare.sources.parquet_columns import LABEL_NAMES, ParquetOptions
from mae_vit.data.shards.dataset_json import FILE_NAME, read_dataset
from mae_vit.data.shards.samples import (
    Group,
    is_image_field,
    label_number,
    no_single_label,
    read_groups,
    read_label,
    split_key,
)
from mae_vit.data.shards.tar_headers import DamagedTar, Special, Tar, walk_tar

# A number in a stranger's .cls must not make us write a list of billions of classes.
_MAX_CLASSES = 1_000_000
# Of so many samples members are looked at that may be labels.
_LOOKED_AT = 100
_TEXTS = ("txt", "text")


def find_shards(folder: Path) -> list[Path]:
    """Returns the tars in a folder and below it, but for hidden ones; with our `dataset.json`, those it names."""
    if (folder / FILE_NAME).exists():
        described = read_dataset(folder)
        return [folder / shard.file for split in described.splits.values() for shard in split.shards]
    return sorted(
        path
        for path in walk(folder)
        if is_tar(path) and not is_hidden(str(path.relative_to(folder))) and path.is_file()
    )


def split_of(shard: Path, folder: Path, default: str) -> str:
    """The split that a shard's name or folder tells ("imagenet-val-000012.tar"), or `default`."""
    words = re.split(r"[-_.]", shard.stem)
    with suppress(ValueError):
        words = [word for part in shard.relative_to(folder).parts for word in re.split(r"[-_.]", part)]
    # The last is nearest to the shard's number.
    return next(filter(None, map(split_named, reversed(words))), default)


def image_member(tar: Tar) -> str | None:
    """Returns the field of members that are images by their first bytes and not by name: "image" of KEY.image.

    Only of samples, which have a member beside it; others are files of an archive.
    """
    fields: dict[str, set[str]] = {}
    found = None
    with suppress(DamagedTar, OSError):
        for member in islice(walk_tar(tar), _LOOKED_AT):
            key, field = split_key(member.name)
            fields.setdefault(key, set()).add(field)
            if is_image_field(field) or field in ARRAY_EXTENSIONS:
                return None
            if key and found is None and field not in OTHER_EXTENSIONS:
                kind = image_kind(tar.read(member.offset, min(HEAD_BYTES, member.size)))
                found = (key, field) if kind in IMAGE_EXTENSIONS else None
    return found[1] if found and len(fields[found[0]]) > 1 else None


def is_shard(tar: Tar) -> bool:
    """Whether a tar is a shard of samples, rather than an archive of images or of class folders."""
    images, others, folders = set(), set(), set()
    try:
        for member in walk_tar(tar):
            key, field = split_key(member.name)
            if key and is_image_field(field):
                images.add(key)
                folders.add(key.rpartition("/")[0])
            elif key:
                others.add((key, field == "cls"))
    except (DamagedTar, OSError):
        return False  # who reads it says what is wrong
    labeled = any((key, True) in others for key in images)
    return labeled or (len(folders) == 1 and any((key, False) in others for key in images))


def open_shards(
    folder: Path, shards: Sequence[Tar], *, split: str, name: str, columns: ParquetOptions, labels: bool
) -> ImageSource:
    """Lists the images of shards, and their labels: of `.cls`, or of the field that the user names.

    Args:
        folder: that holds them.
        shards: to read.
        split: of shards whose names tell none.
        name: of the source.
        columns: which fields are images and labels, where the user says so.
        labels: whether labels are read.

    Raises:
        InputError: if one is damaged, holds paths that leave its folder, or its labels make
            no sense.
    """
    known = read_dataset(folder) if (folder / FILE_NAME).exists() else None
    splits = {s.file: name for name, info in known.splits.items() for s in info.shards} if known else {}
    special, lost = list[Special](), list[str]()
    found = [(shard, _read_groups(shard, special, columns.image_column, lost)) for shard in shards]
    known_labels = {
        (place, number): label
        for place, (shard, groups) in enumerate(found)
        for number, label in enumerate(_labels(shard, groups, columns.label_column))
        if labels and label
    }
    if columns.label_column and not known_labels:
        raise InputError(
            f"--label-column {columns.label_column}: no sample has such a member, or key of its json: {_fields(found)}"
        )
    for (place, number), named in known_labels.items():
        if no_single_label(named):
            shard, groups = found[place]
            raise InputError(
                f"shard {shard.name}: the label of {plain_text(groups[number].key)} is "
                f'"{plain_text(_text(named)[:40])}": one class of each image is read, a number or a name; --no-labels '
                "takes the images alone"
            )
    numbers = {label: label_number(label) for label in known_labels.values()}
    numbered = None not in numbers.values()
    if known is not None:
        classes = known.classes
    elif numbered:
        classes = numbered_classes(max((number or 0 for number in numbers.values()), default=-1), folder)
    else:
        classes = sorted({_text(label) for label, number in numbers.items() if (number or 0) >= 0})
    entries = []
    keys: dict[str, dict[str, int]] = {}
    others, negative = Counter[str](), 0
    for place, (shard, groups) in enumerate(found):
        own = splits.get(shard.name.name) or split_of(shard.name, folder, split)
        for number, group in enumerate(groups):
            field = _image(shard, group, columns.image_column)
            if field is None:
                lost.append(group.key)
                continue
            others.update(other for other in group.fields if other != field and is_image_field(other))
            # Keys become names in our shards.
            path = safe_member_path(f"{group.key}.{field}", str(shard.name))
            class_name, label = None, known_labels.get((place, number))
            if label is not None:
                which = numbers[label]
                if which is not None and which < 0:
                    negative += 1
                elif which is None or not numbered:
                    class_name = _text(label)
                else:
                    class_name = _class_of(which, path, shard, classes)
            key = unique_key(group.key, keys.setdefault(own, {}))
            read = partial(_read, shard, *group.fields[field])
            extension = field.rpartition(".")[2]
            entries.append(Entry(own, class_name, key, plain_text(path), extension, read))
    if columns.image_column and not entries:
        raise InputError(
            f"--image-column {columns.image_column}: no sample has such a member: {_fields(found)}"
        )
    notes = []
    if others:
        notes.append(f"left out images beside others of their samples: {', '.join(others)} (--image-column)")
    if negative:
        notes.append(without_label(negative))
    if special:
        notes.append(f"skipped {count_of(len(special), 'member')} of shards that are links, devices or pipes")
    if lost:
        notes.append(f"skipped {count_of(len(lost), 'sample')} without an image: {shown(sorted(lost))}")
    if labels and not known_labels and (hint := label_hint(found)):
        notes.append(hint)
    return ImageSource(name, entries, classes=tuple(classes) if classes else None, notes=tuple(notes))


def _read_groups(shard: Tar, special: list[Special], asked: str | None, lost: list[str]) -> list[Group]:
    try:
        return read_groups(shard, special, asked, lost)
    except (DamagedTar, OSError) as error:
        raise InputError(f"shard {shard.name} cannot be used: {error}") from None


def _image(shard: Tar, group: Group, asked: str | None) -> str | None:
    try:
        return group.image(shard.name, asked)
    except DamagedTar as error:
        raise InputError(f"shard {error}") from None


def _labels(shard: Tar, groups: Sequence[Group], asked: str | None) -> Iterator[bytes | None]:
    """The label of each group: of a member, or a key of its json."""
    with shard.path.open("rb") as file:
        for group in groups:
            if place := group.fields.get(asked or "cls"):
                yield read_label(file.fileno(), *place)
            elif asked and "json" in group.fields:
                value = _json(shard, group).get(asked)
                if not isinstance(value, str | int | None):
                    raise InputError(
                        f"shard {shard.name}: {asked} of {plain_text(group.key)}.json is neither a number nor text"
                    )
                yield None if value is None else str(value).strip().encode("utf-8", "surrogateescape")
            else:
                yield None


def _json(shard: Tar, group: Group) -> dict[str, Any]:
    offset, size = group.fields["json"]
    try:
        found = json.loads(shard.read(offset, size))
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {}


def label_hint(found: Sequence[tuple[Tar, list[Group]]]) -> str:
    """Names what looks like labels in samples that have no `.cls`; empty if nothing does."""
    seen: dict[tuple[str, str], list[bytes]] = {}
    looked_at = [(shard, group) for shard, groups in found[:2] for group in groups[:_LOOKED_AT]]
    for shard, group in looked_at:
        for field, (offset, size) in group.fields.items():
            if field == "json":
                for key, value in _json(shard, group).items():
                    if key.lower() in LABEL_NAMES and isinstance(value, str | int):
                        seen.setdefault(("json", key), []).append(str(value).encode())
            elif field in _TEXTS or field.partition(".")[0] in LABEL_NAMES:
                seen.setdefault((field, field), []).append(shard.read(offset, min(size, 64)))
    for (member, name), values in seen.items():
        # Captions differ, labels come again.
        if name not in _TEXTS or (len(set(values)) <= len(values) // 2 and max(map(len, values)) < 64):
            count = sum(member in group.fields for _, groups in found for group in groups)
            members = f"{count:,} .{member} members look" if count > 1 else f"a .{member} member looks"
            return f"no labels; {members} like labels: --label-column {name}"
    return ""


def _fields(found: Sequence[tuple[Tar, list[Group]]]) -> str:
    """Lists the members of samples, and the keys of their json."""
    groups = [(shard, group) for shard, groups in found[:1] for group in groups[:1]]
    members = sorted({field for _, group in groups for field in group.fields})
    keys = sorted({key for shard, group in groups if "json" in group.fields for key in _json(shard, group)})
    in_json = f", and in json {', '.join(keys)}" if keys else ""
    return f"there are {', '.join(members)}{in_json}"


def numbered_classes(largest: int, folder: Path) -> list[str]:
    """Names classes 0..largest of shards that say nothing of them.

    Raises:
        InputError: if the number is out of all proportion.
    """
    if largest >= _MAX_CLASSES:
        raise InputError(f"{folder}: a .cls says class {largest}; at most {_MAX_CLASSES} are taken")
    return [str(number) for number in range(largest + 1)]


def without_label(negative: int) -> str:
    """Says that images of negative classes have no label."""
    return f"{count_of(negative, 'image')} without a label: the class is negative"


def _text(label: bytes) -> str:
    return plain_text(unicodedata.normalize("NFC", label.decode("utf-8", "surrogateescape")))


def _class_of(number: int, path: str, shard: Tar, classes: Sequence[str]) -> str:
    if number >= len(classes):
        raise InputError(
            f"shard {shard.name}: {plain_text(path)} is of class {number}; there are {len(classes)}"
        )
    return classes[number]


def _read(shard: Tar, offset: int, length: int) -> bytes:
    check_bytes(length)
    return shard.read(offset, length)
