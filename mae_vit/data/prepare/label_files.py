"""`prepare --labels FILE`: labels of images from a CSV or TSV, as people have them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from mae_vit.core.errors import InputError
from mae_vit.core.messages import closest, count_of, plain_text
from mae_vit.core.user_files import LABEL_NAMES, split_told
from mae_vit.data.prepare.entries import ImageSource
from mae_vit.data.prepare.label_lists import Names
from mae_vit.data.prepare.listing import shown
from mae_vit.data.prepare.sources.tables import (
    BITS,
    PATHS,
    class_of_cell,
    ordered_classes,
    read_lines,
    shared_folders,
)
from mae_vit.data.shards.samples import label_number, no_single_label

# Rows that decide which column names images.
_LOOKED_AT = 200
_FRACTION = re.compile(r"[+-]?(\d+\.\d*|\.\d+)(e[+-]?\d+)?", re.IGNORECASE)
_JOINS = re.compile(r"\s*[|;,]\s*")
_ONE_CLASS = "keep one class per image, or leave --labels out (pretraining needs none)"


class _Columns(NamedTuple):
    """The columns that are read, by place: of one label, or of 0 and 1 for each class."""

    image: int
    label: int | None
    bits: tuple[int, ...]
    split: int | None


def label_by_file(
    source: ImageSource, file: Path, *, image_column: str | None = None, label_column: str | None = None
) -> ImageSource:
    """Gives the images of a source the labels of a file; an image without a row keeps none.

    Args:
        source: the images, named by their paths in it.
        file: the table: a first line of names or none; paths with or without folders and extension.
        image_column: name of the column of images, or its number from 1; None finds it.
        label_column: the same for the labels.

    Raises:
        InputError: if columns are unclear, no row names an image, or labels are several for an image or fractions.
    """
    names = Names(entry.path for entry in source.entries)
    header, rows = _with_header(read_lines(file), names)
    if not rows:
        raise InputError(f"--labels {file} has no rows; write a line for each image, such as cats/1.jpg,cat")
    columns = _choose(file, header, rows, names, image_column, label_column)
    cells = [(row[columns.image], _label(file, header, row, columns)) for row in rows]
    # Leading folders that all paths share may be those of another machine.
    elsewhere = len(shared_folders([path for path, _ in cells]))
    found = [_find(names, path, elsewhere) for path, _ in cells]
    if not any(found):
        raise InputError(
            f"--labels {file}: none of its {count_of(len(rows), 'row')} is an image of {source.name}; it has "
            f"{shown(path for path, _ in cells)}, {source.name} has {names}"
        )
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
        if columns.split is not None and row[columns.split]:
            splits[path] = split_told(row[columns.split])
    if len({entry.split for entry in source.entries}) > 1:
        splits = {}  # folders tell the splits
    unknown = [path for (path, _), image in zip(cells, found, strict=True) if image is None]
    return _labeled(source, file, labels, splits, unknown)


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


def _with_header(lines: list[list[str]], names: Names) -> tuple[list[str], list[list[str]]]:
    """Returns the names of the columns, numbers from 1 if the first line is of an image, and the other lines."""
    first = lines[0] if lines else []
    known = {name.lower() for name in first} & {*PATHS, *LABEL_NAMES}
    headless = not known and any(cell and names.find(cell) for cell in first)
    header = [str(place + 1) for place in range(len(first))] if headless else first
    rows = [[*row, *[""] * (len(header) - len(row))] for row in lines[not headless :] if any(row)]
    return header, rows


def _choose(
    file: Path,
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    names: Names,
    image_column: str | None,
    label_column: str | None,
) -> _Columns:
    lower = [name.lower() for name in header]

    def asked(option: str, name: str) -> int:
        if name.lower() in lower:
            return lower.index(name.lower())
        if name.isdecimal() and 0 < int(name) <= len(header):
            return int(name) - 1
        hint = closest(name, header) or f"it has {shown(header)}"
        raise InputError(f"{option} {name}: {file} has no such column; {hint}")

    def images(place: int) -> int:
        return sum(bool(row[place] and names.find(row[place])) for row in rows[:_LOOKED_AT])

    if image_column is not None:
        image = asked("--image-column", image_column)
    else:
        usual = [place for place, name in enumerate(lower) if name in PATHS]
        image = usual[0] if len(usual) == 1 else max(range(len(header)), key=images)
    split = next((place for place, name in enumerate(lower) if name == "split" and place != image), None)
    rest = [place for place in range(len(header)) if place not in (image, split)]
    if label_column is not None:
        return _Columns(image, asked("--label-column", label_column), (), split)
    usual = [place for place in rest if lower[place] in LABEL_NAMES] or rest
    if len(usual) == 1:
        return _Columns(image, usual[0], (), split)
    bits = tuple(place for place in rest if all(row[place].lower() in BITS for row in rows))
    if len(bits) > 1:
        return _Columns(image, None, bits, split)
    raise InputError(
        f"--labels {file}: several columns may be the label; give --label-column NAME "
        f"({shown(header[place] for place in rest) or 'it has only one column'})"
    )


def _label(file: Path, header: Sequence[str], row: Sequence[str], columns: _Columns) -> str:
    """Returns the label in a row; "" without one."""
    if columns.label is not None:
        return row[columns.label]
    ones = [header[place] for place in columns.bits if BITS[row[place].lower()]]
    if len(ones) > 1:
        raise InputError(
            f"--labels {file} has several labels for {plain_text(row[columns.image])} ({', '.join(ones)}); "
            f"{_ONE_CLASS}"
        )
    return ones[0] if ones else ""


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
