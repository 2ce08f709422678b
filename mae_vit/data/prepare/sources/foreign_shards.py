"""Reads shards of other tools: tars of KEY.jpg, KEY.cls, KEY.json, without `dataset.json`."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from mae_vit.core import user_files
from mae_vit.core.errors import InputError
from mae_vit.core.messages import count_of, plain_text
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
from mae_vit.data.prepare.sources.archives import is_tar, read_member
from mae_vit.data.prepare.sources.folders import walk
from mae_vit.data.shards.dataset_json import FILE_NAME, read_dataset
from mae_vit.data.shards.samples import (
    MASK_EXTENSION,
    Group,
    is_image_field,
    label_number,
    no_single_label,
    read_groups,
    read_label,
    split_key,
)
from mae_vit.data.shards.tar_headers import DamagedTar, Member, Tar, walk_tar

# Number of members to look at for images with other extensions.
_LOOKED_AT = 100


def find_shards(folder: Path) -> list[Path]:
    """Returns the tars in and below a folder, except hidden ones; with our `dataset.json`, those that it lists.

    Raises:
        InputError: if one of these is missing.
    """
    if (folder / FILE_NAME).exists():
        described = read_dataset(folder)
        paths = [folder / shard.file for split in described.splits.values() for shard in split.shards]
        if gone := next((path for path in paths if not path.exists()), None):
            raise InputError(f"shard {gone} is missing; restore it, or delete {FILE_NAME} first")
        return paths
    return sorted(
        path
        for path in walk(folder)
        if is_tar(path) and not user_files.is_hidden(str(path.relative_to(folder))) and path.is_file()
    )


def image_member(tar: Tar) -> str | None:
    """Returns the field of members that are images by their first bytes, not by name: "image" for KEY.image.

    Its sample must have another member; a single member is a file of an archive.
    """
    fields: dict[str, set[str]] = {}
    first = None
    with suppress(DamagedTar, OSError):
        for member in islice(walk_tar(tar), _LOOKED_AT):
            key, field = split_key(member.name)
            fields.setdefault(key, set()).add(field)
            if is_image_field(field) or field in user_files.ARRAY_EXTENSIONS:
                return None
            if key and first is None and field not in user_files.OTHER_EXTENSIONS:
                kind = user_files.image_kind(tar.read(member.offset, min(user_files.HEAD_BYTES, member.size)))
                first = (key, field) if kind in user_files.IMAGE_EXTENSIONS else None
    return first[1] if first and len(fields[first[0]]) > 1 else None


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
        return False  # reading it reports what is wrong
    labeled = any((key, True) in others for key in images)
    return labeled or (len(folders) == 1 and any((key, False) in others for key in images))


def open_shards(folder: Path, shards: Sequence[Tar], name: str, options: SourceOptions) -> ImageSource:
    """Lists the images of shards in a folder, with labels from `.cls` or from the field that the user names.

    Raises:
        InputError: if a shard is damaged, holds paths that leave its folder, or its labels make no sense.
    """
    known = read_dataset(folder) if (folder / FILE_NAME).exists() else None
    splits = {s.file: split for split, info in known.splits.items() for s in info.shards} if known else {}
    segmentation = known.segmentation if known else None
    special, lost = list[str](), list[str]()
    samples = [sample for shard in shards for sample in _read_samples(shard, options, special, lost)]
    numbers = {label: label_number(label) for *_, label in samples if label}
    numbered = None not in numbers.values()
    if known:
        classes = tuple(known.classes)
    elif numbered:
        classes = numbered_classes(max((number or 0 for number in numbers.values()), default=-1), str(folder))
    else:
        classes = tuple(sorted({_text(label) for label, number in numbers.items() if (number or 0) >= 0}))
    entries, negative, others = list[Entry](), 0, Counter[str]()
    keys: dict[str, dict[str, int]] = {}
    for shard, group, label in samples:
        try:
            member = group.image(shard.name, options.image_column)
        except DamagedTar as error:
            raise InputError(f"shard {error}") from None
        if member is None:
            lost.append(group.key)
            continue
        others.update(other for other in group.fields if other != member and is_image_field(other))
        # Keys become names in our shards.
        path = safe_member_path(f"{group.key}.{member}", str(shard.name))
        number = numbers[label] if label else None
        negative += number is not None and number < 0
        class_name = None
        if number is not None and number >= len(classes) and numbered:
            raise InputError(
                f"shard {shard.name}: {path} has class {number}, but there are only {len(classes)}; use --no-labels"
            )
        if label and (number is None or number >= 0):
            class_name = classes[number] if numbered and number is not None else _text(label)
        split = splits.get(shard.name.name) or user_files.split_from_path(shard.name, folder, options.split)
        key = unique_key(group.key, keys.setdefault(split, {}))
        read = partial(read_member, shard, Member(path, *group.fields[member]))
        mask = group.fields.get(MASK_EXTENSION) if segmentation else None
        read_mask = partial(read_member, shard, Member(path, *mask)) if mask else None
        extension = member.rpartition(".")[2]
        entries.append(Entry(split, class_name, key, plain_text(path), extension, read, read_mask))
    for option, asked, absent in (
        ("--image-column", options.image_column, not entries),
        ("--label-column", options.label_column, not numbers),
    ):
        if asked and absent:
            raise InputError(f"{option} {asked}: no sample has such a member or JSON key; {_fields(samples)}")
    notes = without_label_note(negative, "the class is negative")
    if others:
        notes.append(f"left out further images of samples: {', '.join(others)} (--image-column)")
    if special:
        count = count_of(len(special), "member")
        notes.append(f"skipped {count} of shards that are links, devices or pipes")
    if lost:
        notes.append(f"skipped {count_of(len(lost), 'sample')} without an image: {shown(sorted(lost))}")
    # One of the other members may hold labels.
    if options.labels and not numbers and samples and not all(map(is_image_field, samples[0][1].fields)):
        notes.append(f"no labels: {_fields(samples)} (--label-column NAME chooses one)")
    return ImageSource(
        name, entries, classes=classes or None, notes=tuple(notes), segmentation=segmentation, described=known
    )


def _read_samples(
    shard: Tar, options: SourceOptions, special: list[str], lost: list[str]
) -> Iterator[tuple[Tar, Group, bytes | None]]:
    """Yields the samples of a shard, with their labels if the options ask for them.

    `special` receives links, devices and pipes that are not followed; `lost` the keys of members without an image.
    """
    try:
        groups = read_groups(shard, special, options.image_column, lost)
    except (DamagedTar, OSError) as error:
        raise InputError(f"shard {shard.name} cannot be used: {error}") from None
    labels = _labels(shard, groups, options.label_column) if options.labels else [None] * len(groups)
    for group, label in zip(groups, labels, strict=True):
        if label and no_single_label(label):
            raise InputError(
                f'shard {shard.name}: the label of {group.key} is "{_text(label)[:40]}", not a single number or '
                "name; choose another with --label-column, or use --no-labels"
            )
        yield shard, group, label or None


def _labels(shard: Tar, groups: Sequence[Group], asked: str | None) -> Iterator[bytes | None]:
    """Yields the label of each group, from a member or from a key of its json."""
    with shard.path.open("rb") as file:
        for group in groups:
            if member := group.fields.get(asked or "cls"):
                yield read_label(file.fileno(), *member)
            elif asked and "json" in group.fields:
                value = _json(shard, group).get(asked)
                if not isinstance(value, str | int | float | None):
                    raise InputError(
                        f"shard {shard.name}: {asked} of {group.key}.json is neither a number nor text; choose "
                        "another with --label-column"
                    )
                # pandas writes NaN for none.
                yield (
                    None
                    if value is None or value != value
                    else str(value).strip().encode("utf-8", "surrogateescape")
                )
            else:
                yield None


def _json(shard: Tar, group: Group) -> dict[str, Any]:
    try:
        content = json.loads(shard.read(*group.fields["json"]))
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}


def _fields(samples: Sequence[tuple[Tar, Group, bytes | None]]) -> str:
    """Lists the members of the first sample, and the keys of its json."""
    if not samples:
        return "there are no samples"
    shard, group, _ = samples[0]
    keys = sorted(_json(shard, group)) if "json" in group.fields else []
    in_json = f", and in json {', '.join(keys)}" if keys else ""
    return f"there are {', '.join(sorted(group.fields))}{in_json}"


def _text(label: bytes) -> str:
    return class_text(label.decode("utf-8", "surrogateescape"))
