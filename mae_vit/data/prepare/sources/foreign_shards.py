"""Shards made by others: tars of KEY.jpg, KEY.cls, KEY.json, without `dataset.json`."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
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
    LABEL_NAMES,
    OTHER_EXTENSIONS,
    image_kind,
    is_hidden,
    split_from_path,
)
from mae_vit.data.images.decode import check_bytes
from mae_vit.data.prepare.entries import (
    Entry,
    ImageSource,
    SourceOptions,
    class_text,
    numbered_classes,
    safe_member_path,
    unique_key,
    without_label_note,
)
from mae_vit.data.prepare.listing import shown
from mae_vit.data.prepare.sources.archives import is_tar
from mae_vit.data.prepare.sources.folders import walk
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


@dataclass
class _Samples:
    """The samples of shards.

    Attributes:
        found: each with its shard; a group has an image, unless `--image-column` names another member.
        labels: of each, None without one.
        special: links, devices and pipes.
        lost: keys of members without an image.
    """

    found: list[tuple[Tar, Group]] = field(default_factory=list)
    labels: list[bytes | None] = field(default_factory=list)
    special: list[Special] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)


def open_shards(folder: Path, shards: Sequence[Tar], name: str, options: SourceOptions) -> ImageSource:
    """Lists the images of shards, and their labels: of `.cls`, or of the field that the user names.

    Args:
        folder: that holds them.
        shards: to read.
        name: of the source.
        options: which fields are images and labels, and the split of shards whose names tell none.

    Raises:
        InputError: if one is damaged, holds paths that leave its folder, or its labels make
            no sense.
    """
    known = read_dataset(folder) if (folder / FILE_NAME).exists() else None
    splits = {s.file: split for split, info in known.splits.items() for s in info.shards} if known else {}
    samples = _read_samples(shards, options)
    numbers = {label: label_number(label) for label in samples.labels if label}
    numbered = None not in numbers.values()
    classes = tuple(known.classes) if known else _classes(numbers, numbered, str(folder))
    entries, negative, others = list[Entry](), 0, Counter[str]()
    keys: dict[str, dict[str, int]] = {}
    for (shard, group), label in zip(samples.found, samples.labels, strict=True):
        member = _image(shard, group, options.image_column)
        if member is None:
            samples.lost.append(group.key)
            continue
        others.update(other for other in group.fields if other != member and is_image_field(other))
        # Keys become names in our shards.
        path = safe_member_path(f"{group.key}.{member}", str(shard.name))
        class_name = None
        if label and (number := numbers[label]) is not None and number < 0:
            negative += 1
        elif label and numbered:
            class_name = _numbered_class(number or 0, path, shard, classes)
        elif label:
            class_name = _text(label)
        split = splits.get(shard.name.name) or split_from_path(shard.name, folder, options.split)
        key = unique_key(group.key, keys.setdefault(split, {}))
        read = partial(_read, shard, *group.fields[member])
        entries.append(Entry(split, class_name, key, plain_text(path), member.rpartition(".")[2], read))
    if options.image_column and not entries:
        raise InputError(
            f"--image-column {options.image_column}: no sample has such a member: {_fields(samples.found)}"
        )
    notes = [*without_label_note(negative, "the class is negative")]
    if others:
        notes.append(f"left out images beside others of their samples: {', '.join(others)} (--image-column)")
    if samples.special:
        count = count_of(len(samples.special), "member")
        notes.append(f"skipped {count} of shards that are links, devices or pipes")
    if samples.lost:
        count = count_of(len(samples.lost), "sample")
        notes.append(f"skipped {count} without an image: {shown(sorted(samples.lost))}")
    if options.labels and not numbers and (hint := label_hint(samples.found)):
        notes.append(hint)
    return ImageSource(name, entries, classes=classes or None, notes=tuple(notes))


def _read_samples(shards: Sequence[Tar], options: SourceOptions) -> _Samples:
    """Lists the samples of shards, and reads their labels if they are wanted.

    Raises:
        InputError: if a shard cannot be used, or a label is neither a number nor a name.
    """
    samples = _Samples()
    for shard in shards:
        try:
            groups = read_groups(shard, samples.special, options.image_column, samples.lost)
        except (DamagedTar, OSError) as error:
            raise InputError(f"shard {shard.name} cannot be used: {error}") from None
        samples.found += [(shard, group) for group in groups]
        labels = _labels(shard, groups, options.label_column) if options.labels else [None] * len(groups)
        for group, label in zip(groups, labels, strict=True):
            if label and no_single_label(label):
                raise InputError(
                    f"shard {shard.name}: the label of {plain_text(group.key)} is "
                    f'"{_text(label)[:40]}": one class of each image is read, a number or a name; --no-labels '
                    "takes the images alone"
                )
            samples.labels.append(label or None)
    if options.label_column and not any(samples.labels):
        raise InputError(
            f"--label-column {options.label_column}: no sample has such a member, or key of its json: "
            f"{_fields(samples.found)}"
        )
    return samples


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


def _classes(numbers: Mapping[bytes, int | None], numbered: bool, where: str) -> tuple[str, ...]:
    """All classes: 0 to the largest number, or the names."""
    if numbered:
        return numbered_classes(max((number or 0 for number in numbers.values()), default=-1), where)
    return tuple(sorted({_text(label) for label, number in numbers.items() if (number or 0) >= 0}))


def _numbered_class(number: int, path: str, shard: Tar, classes: Sequence[str]) -> str:
    if number >= len(classes):
        raise InputError(
            f"shard {shard.name}: {plain_text(path)} is of class {number}; there are {len(classes)}"
        )
    return classes[number]


def _image(shard: Tar, group: Group, asked: str | None) -> str | None:
    try:
        return group.image(shard.name, asked)
    except DamagedTar as error:
        raise InputError(f"shard {error}") from None


def _json(shard: Tar, group: Group) -> dict[str, Any]:
    try:
        content = json.loads(shard.read(*group.fields["json"]))
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}


def label_hint(samples: Sequence[tuple[Tar, Group]]) -> str:
    """Names what looks like labels in samples that have no `.cls`; empty if nothing does."""
    values: dict[tuple[str, str], list[bytes]] = {}
    for shard, group in samples[:_LOOKED_AT]:
        for member, (offset, size) in group.fields.items():
            if member == "json":
                for key, value in _json(shard, group).items():
                    if key.lower() in LABEL_NAMES and isinstance(value, str | int):
                        values.setdefault(("json", key), []).append(str(value).encode())
            elif member in _TEXTS or member.partition(".")[0] in LABEL_NAMES:
                values.setdefault((member, member), []).append(shard.read(offset, min(size, 64)))
    for (member, name), texts in values.items():
        # Captions differ, labels come again.
        if name not in _TEXTS or (len(set(texts)) <= len(texts) // 2 and max(map(len, texts)) < 64):
            count = sum(member in group.fields for _, group in samples)
            members = f"{count:,} .{member} members look" if count > 1 else f"a .{member} member looks"
            return f"no labels; {members} like labels: --label-column {name}"
    return ""


def _fields(samples: Sequence[tuple[Tar, Group]]) -> str:
    """Lists the members of the first sample, and the keys of its json."""
    shard, group = samples[0] if samples else (None, Group("", {}))
    keys = sorted(_json(shard, group)) if shard and "json" in group.fields else []
    in_json = f", and in json {', '.join(keys)}" if keys else ""
    return f"there are {', '.join(sorted(group.fields))}{in_json}"


def _text(label: bytes) -> str:
    return class_text(label.decode("utf-8", "surrogateescape"))


def _read(shard: Tar, offset: int, length: int) -> bytes:
    check_bytes(length)
    return shard.read(offset, length)
