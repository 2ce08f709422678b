"""`prepare --labels FILE` and `--unlabeled DIR`: labels from a CSV or TSV, and more images without labels."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

from mae_vit.core.errors import InputError
from mae_vit.core.messages import count_of, plain_text
from mae_vit.core.user_files import split_named, split_told
from mae_vit.data.prepare.columns import find_all, read_columns
from mae_vit.data.prepare.entries import (
    Entry,
    ImageSource,
    SourceOptions,
    classes_of_cells,
    digests_of,
    ordered_classes,
    unique_key,
)
from mae_vit.data.prepare.label_lists import Names, several_fit
from mae_vit.data.prepare.listing import shown
from mae_vit.data.prepare.prepare import group
from mae_vit.data.prepare.selection import Selection
from mae_vit.data.prepare.sources.find import find_images
from mae_vit.data.prepare.sources.rows import unread_note
from mae_vit.data.shards.samples import label_number, no_single_label

_FRACTION = re.compile(r"[+-]?(\d+\.\d*|\.\d+)(e[+-]?\d+)?", re.IGNORECASE)
_JOINS = re.compile(r"\s*[|;,]\s*")
_ONE_CLASS = "keep one class per image, or leave --labels out (pretraining needs none)"


def label_by_file(source: ImageSource, file: Path, options: SourceOptions) -> ImageSource:
    """Gives the images of a source the labels of a file; an image without a row keeps none.

    The first line may name columns. Paths may lack folders and extension.

    Raises:
        InputError: if columns are unclear, no row names one image, or labels are several for an image or fractions.
    """
    names = Names(entry.path for entry in source.entries)

    def remedy(columns: Sequence[Sequence[str]]) -> str:
        several = names.several_in(columns)
        return f": {several_fit(several, file.name)}" if several else f" of {source.name}, which has {names}"

    columns, rows = read_columns(file, options, names.find, labeled=True, remedy=remedy)
    cells = list[tuple[str, str]]()
    for row in rows:
        label, *others = columns.labels_of(row)
        if others:
            several = ", ".join((label, *others))
            raise InputError(
                f"--labels {file} has several labels for {plain_text(row[columns.image])} ({several}); {_ONE_CLASS}"
            )
        cells.append((row[columns.image], label))
    found: list[str | None] = find_all(names.find, [path for path, _ in cells])
    lost = [path for (path, _), image in zip(cells, found, strict=True) if image is None]
    several_images = [path for path in lost if names.are_several(path)]
    unclear = f"{several_fit(several_images, file.name)}, and unpack shards that repeat keys"
    if not any(found):
        none = (
            f"none of its {count_of(len(rows), 'row')} is an image of {source.name}; it has "
            f"{shown(path for path, _ in cells)}, {source.name} has {names}"
        )
        raise InputError(f"--labels {file}: {unclear if several_images else none}")
    given = {label for _, label in cells}
    _check_labels(file, given)
    class_of, labels, splits = classes_of_cells(given), dict[str, str | None](), dict[str, str]()
    for path, (_, label), row in zip(found, cells, rows, strict=True):
        if path is None:
            continue
        name = class_of[label]
        if labels.setdefault(path, name) != name:
            raise InputError(
                f'--labels {file} gives {plain_text(path)} the labels "{labels[path]}" and "{name}"; {_ONE_CLASS}'
            )
        if told := columns.split_of(row):
            splits[path] = split_told(told)
    notes = [*source.notes, *unread_note(file.name, columns.unread)]
    if len({entry.split for entry in source.entries}) > 1 and splits:
        notes.append(f"read the splits from the folders of {source.name}, not from {file.name}")
        splits = {}
    entries = [
        replace(entry, class_name=labels.get(entry.path), split=splits.get(entry.path, entry.split))
        for entry in source.entries
    ]
    without = [e.path for e in entries if e.class_name is None and e.split == "train"]
    labeled = sum(entry.class_name is not None for entry in entries)
    notes.append(f"read the labels of {count_of(labeled, 'image')} from {file.name}")
    if unknown := [path for path in lost if not names.are_several(path)]:
        notes.append(
            f"{count_of(len(unknown), 'row')} of {file.name} without an image in {source.name}: {shown(unknown)}"
        )
    if without:
        notes.append(
            f"{count_of(len(without), 'image')} without a label in {file.name}, used only for pretraining: "
            f"{shown(without)}"
        )
    notes += [unclear] if several_images else []
    return replace(source, entries=entries, classes=ordered_classes(entries), notes=tuple(notes))


def _check_labels(file: Path, labels: Collection[str]) -> None:
    """Raises InputError for labels that are several classes, or measurements."""
    if fractions := [
        label for label in labels if _FRACTION.fullmatch(label) and label_number(label.encode()) is None
    ]:
        raise InputError(
            f"--labels {file} has numbers with fractions, such as {min(fractions)}, but only classes are "
            "predicted; group ranges of values into classes"
        )
    for label in labels:
        parts = _JOINS.split(label)
        if (
            "\n" in label
            or no_single_label(label.encode())
            or (len(parts) > 1 and not set(parts).isdisjoint(labels))
        ):
            raise InputError(
                f'--labels {file} has several labels in one cell, "{plain_text(label)}"; {_ONE_CLASS}'
            )


def open_unlabeled(
    spec: str, sources: Sequence[ImageSource], selection: Selection, options: SourceOptions
) -> ImageSource:
    """Opens the training images of a source, without those that are selected from the labeled sources, byte for byte.

    People often pick the images that they label from the others. A copy of a held-out image would be trained on.

    Raises:
        InputError: if it holds no further training images.
    """
    if any(source.segmentation for source in sources):
        raise InputError("--unlabeled adds images without masks; prepare them as a separate data set")
    try:
        found = find_images(spec, options.out, labels=False)
    except InputError:
        asked = {"image_column": options.image_column, "config_name": options.config_name}
        if not any(asked.values()):
            raise
        found = find_images(spec, options.out, labels=False, **asked)
    # Of test.zip all images are of its split.
    own = split_named(Path(spec).name.partition(".")[0]) if Path(spec).is_file() else None
    ours = ("train", "unlabeled", own)
    entries = [replace(entry, split="train") for entry in found.entries if entry.split in ours]
    notes, names = list(found.notes), ", ".join(dict.fromkeys(source.name for source in sources))
    others = [entry for entry in found.entries if entry.split not in ours]
    if left_out := {entry.path: f"of split {entry.split}" for entry in others}:
        notes.append(f"left out {count_of(len(left_out), 'image')} of {spec} in folders of other splits")
    chosen = selection.apply(group(sources)[0])
    labeled = [entry for entries in chosen.values() for entry in entries]
    digests = digests_of([*labeled, *entries], found.name)
    known = set(digests[: len(labeled)]) - {None}
    fresh, copies = list[Entry](), list[Entry]()
    for entry, digest in zip(entries, digests[len(labeled) :], strict=True):
        (copies if digest in known else fresh).append(entry)
    if copies:
        notes.append(f"left out {count_of(len(copies), 'image')} of {spec} that {names} has too")
        left_out |= {entry.path: f"{names} has it too" for entry in copies}
    if not fresh:
        raise InputError(
            f"--unlabeled {spec} has no training images that are not in {names} too; leave it out"
        )
    taken = {entry.key: 2 for entry in labeled}
    keyed = [replace(entry, key=unique_key(f"{found.name}/{entry.key}", taken)) for entry in fresh]
    return replace(found, entries=keyed, notes=tuple(notes), left_out={**found.left_out, **left_out})
