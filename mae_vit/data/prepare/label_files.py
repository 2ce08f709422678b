"""`prepare --labels FILE`: labels of images from a CSV or TSV, as people have them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from mae_vit.core.errors import InputError
from mae_vit.core.messages import count_of, plain_text
from mae_vit.core.user_files import split_told
from mae_vit.data.prepare.columns import Columns, read_columns
from mae_vit.data.prepare.entries import ImageSource, SourceOptions, class_of_cell, ordered_classes
from mae_vit.data.prepare.label_lists import Names, several_fit
from mae_vit.data.prepare.listing import shown
from mae_vit.data.prepare.sources.tables import shared_folders
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

    def find_all(paths: Sequence[str]) -> list[str | None]:
        return [names.find(path) for path in paths]

    def remedy() -> str:
        return f" of {source.name}, which has {names}"

    columns, rows = read_columns(file, options, find_all, labeled=True, remedy=remedy)
    cells = [(row[columns.image], _label(file, columns, row)) for row in rows]
    # Leading folders that all paths share may be those of another machine.
    elsewhere = len(shared_folders([path for path, _ in cells]))
    found = [_find(names, path, elsewhere) for path, _ in cells]
    lost = [path for (path, _), image in zip(cells, found, strict=True) if image is None]
    several = [path for path in lost if names.are_several(path)]
    unclear = f"{several_fit(several, file.name)}, and unpack shards that repeat keys"
    if not any(found):
        none = (
            f"none of its {count_of(len(rows), 'row')} is an image of {source.name}; it has "
            f"{shown(path for path, _ in cells)}, {source.name} has {names}"
        )
        raise InputError(f"--labels {file}: {unclear if several else none}")
    _check_labels(file, [label for _, label in cells])
    signed = {label_number((label or "x").encode()) for _, label in cells} == {-1, 1}
    labels, splits = dict[str, str | None](), dict[str, str]()
    for path, (_, label), row in zip(found, cells, rows, strict=True):
        name = class_of_cell(label, signed=signed)
        if path is None:
            continue
        if labels.setdefault(path, name) != name:
            raise InputError(
                f'--labels {file} gives {plain_text(path)} the labels "{labels[path]}" and "{name}"; {_ONE_CLASS}'
            )
        if told := columns.split_of(row):
            splits[path] = split_told(told)
    if len({entry.split for entry in source.entries}) > 1:
        splits = {}  # folders tell the splits
    unknown = [path for path in lost if not names.are_several(path)]
    labeled = _labeled(source, file, labels, splits, unknown)
    return replace(labeled, notes=(*labeled.notes, unclear)) if several else labeled


def _labeled(
    source: ImageSource,
    file: Path,
    labels: Mapping[str, str | None],
    splits: Mapping[str, str],
    unknown: Sequence[str],
) -> ImageSource:
    entries = [
        replace(entry, class_name=labels.get(entry.path), split=splits.get(entry.path, entry.split))
        for entry in source.entries
    ]
    given = {label for label in labels.values() if label is not None}
    without = [entry.path for entry in entries if entry.class_name is None]
    notes = [f"read the labels of {count_of(len(entries) - len(without), 'image')} from {file.name}"]
    if unknown:
        notes.append(
            f"{count_of(len(unknown), 'row')} of {file.name} without an image in {source.name}: {shown(unknown)}"
        )
    if without:
        notes.append(
            f"{count_of(len(without), 'image')} without a label in {file.name}, used only for pretraining: "
            f"{shown(without)}"
        )
    return replace(source, entries=entries, classes=ordered_classes(given), notes=(*source.notes, *notes))


def _find(names: Names, path: str, shared: int) -> str | None:
    parts = path.replace("\\", "/").split("/")
    ends = ("/".join(parts[cut:]) for cut in range(shared + 1))
    return next(filter(None, map(names.find, ends)), None)


def _label(file: Path, columns: Columns, row: Mapping[str, str]) -> str:
    """Returns the label in a row; "" without one."""
    label, *others = columns.labels_of(row)
    if others:
        several = ", ".join((label, *others))
        raise InputError(
            f"--labels {file} has several labels for {plain_text(row[columns.image])} ({several}); {_ONE_CLASS}"
        )
    return label


def _check_labels(file: Path, labels: Sequence[str]) -> None:
    """Raises InputError for labels that are several classes, or measurements."""
    known = set(labels)
    fractions = [
        label for label in known if _FRACTION.fullmatch(label) and label_number(label.encode()) is None
    ]
    if fractions:
        raise InputError(
            f"--labels {file} has numbers with fractions, such as {min(fractions)}, but only classes are "
            "predicted; group ranges of values into classes"
        )
    for label in known:
        parts = _JOINS.split(label)
        if no_single_label(label.encode()) or (len(parts) > 1 and known.intersection(parts)):
            raise InputError(
                f'--labels {file} has several labels in one cell, "{plain_text(label)}"; {_ONE_CLASS}'
            )
