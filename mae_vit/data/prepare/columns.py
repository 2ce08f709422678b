"""Reads tables as people write them: with a line of names or none; finds the columns of images, labels and splits."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import takewhile, zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from mae_vit.core import user_files
from mae_vit.core.errors import InputError
from mae_vit.core.messages import closest, plain_text
from mae_vit.data.prepare.entries import SourceOptions
from mae_vit.data.prepare.listing import shown

PATHS = ("path", "file", "filename", "file_name", "filepath", "image", "image_path", "img")
# Columns of yes and no -> the split of the images that have yes; `is_valid` is fastai's.
_HELD_OUT = {"is_valid": "val", "is_val": "val", "held_out": "val", "holdout": "val", "is_test": "test"}
_BITS = {"0": 0, "0.0": 0, "false": 0, "1": 1, "1.0": 1, "true": 1}
_ANSWERS = {**_BITS, "no": 0, "n": 0, "yes": 1, "y": 1}
# Rows that decide which column names images.
_LOOKED_AT = 50
Cells = Mapping[str, str]
Find = Callable[[str, int], Any]


class Columns(NamedTuple):
    """A table's columns, all in lower case.

    Attributes:
        names: every column -> its name as written, or its number from 1 in a table without a line of names.
        image: column that names images.
        label: column of labels; None without one.
        bits: columns of 0 and 1, each of one class, in place of `label`.
        split: column of splits; None without one.
    """

    names: Cells
    image: str
    label: str | None
    bits: tuple[str, ...]
    split: str | None

    @property
    def unread(self) -> list[str]:
        """The other columns' names."""
        read = (self.image, self.label, self.split, *self.bits)
        return [written for name, written in self.names.items() if name not in read]

    def labels_of(self, row: Cells) -> list[str]:
        """Returns the labels in a row; [""] without one."""
        ones = [self.names[name] for name in self.bits if _BITS[row[name].lower()]]
        return ones or [row[self.label] if self.label else ""]

    def split_of(self, row: Cells) -> str:
        """Returns what a row says of the split; "" for nothing."""
        told = row[self.split] if self.split else ""
        bit = _ANSWERS.get(told.lower()) if self.split in _HELD_OUT else None
        return told if bit is None else ("train", _HELD_OUT[str(self.split)])[bit]


def read_columns(
    table: Path,
    options: SourceOptions,
    find: Find,
    *,
    labeled: bool,
    remedy: Callable[[Sequence[Sequence[str]]], str],
) -> tuple[Columns, list[dict[str, str]]]:
    """Reads a table; returns its columns, and the cells of each row by column.

    `find` returns the image of a name without some leading folders, or None. If `labeled`, the table must have labels,
    in any column. `remedy` of the columns' first cells tells what to do if no column names images.

    Raises:
        InputError: if it is no such text, or if columns are unclear.
    """
    names, rows, headless = _with_header(table, find)
    if not rows:
        raise InputError(f"table {table} has no rows; write a line for each image, such as cats/1.jpg,cat")
    image, label = (
        text and _asked(table, names, text, option)
        for option, text in (
            ("--image-column", options.image_column),
            ("--label-column", options.label_column),
        )
    )
    split = _find_splits(names, rows, (image, label, *user_files.LABEL_NAMES))
    labels = [name for name in names if name in user_files.LABEL_NAMES]
    if image:
        images = [image]
    else:
        images = [name for name in names if name in PATHS]
        if len(images) != 1:
            among = [name for name in images or names if name not in (*labels, split)]
            found = {name: find_all(find, [row[name] for row in rows[:_LOOKED_AT]]) for name in among}
            counts = {name: sum(one is not None for one in those) for name, those in found.items()}
            most = max(counts.values(), default=0)
            if not most:
                columns = [[row[name] for row in rows[:_LOOKED_AT]] for name in among]
                raise InputError(
                    f"table {table}: no column of {shown(names.values())} lists images{remedy(columns)}"
                )
            first, *tied = [name for name, count in counts.items() if count == most]
            # Labels need no choice among columns of the same images: 1 and 1.jpg.
            images = [first, *(name for name in tied if not labeled or found[name] != found[first])]
    rest = [name for name in names if name not in (images[0], split)]
    bits: tuple[str, ...] = ()
    if label:
        labels = [label]
    elif not labels:
        # Columns of 0 and 1 are a one-hot label.
        hot = tuple(name for name in rest if all(row[name].lower() in _BITS for row in rows))
        if len(hot) > 1 and (
            labeled or all(sum(_BITS[row[name].lower()] for name in hot) == 1 for row in rows)
        ):
            bits = hot
        elif labeled or headless:
            labels = rest
    if not options.labels:
        labels, bits = [], ()
    unclear = f" --image-column {shown([names[images[0]]])}" if len(images) > 1 else ""
    if len(labels) > 1:
        unclear += " --label-column NAME"
    if unclear:
        listed = plain_text(", ".join(names[name] for name in dict.fromkeys((*images, *labels, *names))))
        raise InputError(
            f"table {table}: several of the columns {listed} may be paths or labels; choose with{unclear}"
        )
    if labeled and not labels and not bits:
        raise InputError(f"table {table} has no column of labels, only {shown(names.values())}; add one")
    return Columns(names, images[0], labels[0] if labels else None, bits, split), rows


def _find_splits(names: Cells, rows: Sequence[Cells], others: Collection[str | None]) -> str | None:
    """Returns the column of splits: by its name, or the one that has names of several splits and nothing else."""
    for name in dict.fromkeys(("split", *_HELD_OUT, *names)):
        values = {row.get(name, "") for row in rows} - {""}
        if not values or name in others:
            continue
        splits = set(map(user_files.split_named, values))
        # Numbers are folds: which of them are held out is not known.
        named = name == "split" and not all(map(str.isdecimal, values))
        held_out = name in _HELD_OUT and all(value.lower() in _ANSWERS for value in values)
        if held_out and (other := next((each for each in _HELD_OUT if each in names and each != name), None)):
            raise InputError(
                f"the columns {name} and {other} both hold images out; write one column of train, val and test"
            )
        if named or held_out or (len(splits) > 1 and None not in splits):
            return name
    return None


def find_all(find: Find, names: Sequence[str]) -> list[Any]:
    """Finds the image of each name in a column, or None.

    If none is found, they may be paths of another machine: up to all leading folders that they share, before one named
    like a split, are left out.
    """
    found = [find(name, 0) for name in names]
    if any(found) or any("//" in name for name in names):
        return found
    parts = [tuple(name.replace("\\", "/").split("/")[:-1]) for name in names]
    shared = takewhile(
        lambda level: len(set(level)) == 1 and not user_files.split_named(level[0]), zip(*parts, strict=False)
    )
    elsewhere = sum(1 for _ in shared)
    return [find(name, elsewhere) for name in names] if elsewhere else found


def _with_header(table: Path, find: Find) -> tuple[dict[str, str], list[dict[str, str]], bool]:
    """Returns the columns' names as written by those in lower case, the rows, and whether the table names none."""
    first, *rows = read_lines(user_files.read_text(table), f"table {table}: ") or [[]]
    known = {name.lower() for name in first} & {*PATHS, *user_files.LABEL_NAMES}
    second = [*find_all(find, rows[0] if rows else first), *[None] * len(first)]
    pairs = zip(first, find_all(find, first), second, strict=False)
    # A word of a header may be an image's name too: 1 of 1.jpg.
    headless = not known and any(
        user_files.is_image(cell) or (one is not None and below is not None) for cell, one, below in pairs
    )
    written = [str(number) for number in range(1, len(first) + 1)] if headless else first
    names = {name.lower(): name for name in written if name}
    if len(names) < sum(map(bool, written)):
        raise InputError(f"table {table}: two columns have the same name ({shown(written)}); rename one")
    if longer := next((row for row in rows if any(row[len(first) :])), None):
        raise InputError(
            f"table {table}: the line {plain_text(', '.join(longer))} has more cells than the first line; delete "
            'a title above the header, or put quotes (") around a cell that contains a comma or another separator'
        )
    columns, rows = [name.lower() for name in written], [first, *rows] if headless else rows
    return names, [dict(zip_longest(columns, row, fillvalue="")) for row in rows], headless


def read_lines(text: str, where: str, *, uneven: bool = False) -> list[list[str]]:
    """Returns the cells of each line of a text, which `where` names in errors.

    Tabs, semicolons or commas separate them, whichever the first line has most; or blanks, if all lines have as many or
    the text may be `uneven`, as a list below a comment. Empty lines, and Excel's line sep=; above all, are no rows.

    Raises:
        InputError: if it is no such text.
    """
    first = text.lstrip("\r\n").partition("\n")[0]
    delimiter = max("\t", ";", ",", key=first.count)
    counts = {len(line.split()) for line in text.splitlines() if line.strip()}
    if delimiter not in first and (uneven or len(counts) == 1):
        delimiter = " "
    lines = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, skipinitialspace=True, strict=True)
    try:
        cells = ([cell.strip() for cell in line] for line in lines)
        return [line for line in cells if any(line) and line[0] != "sep="]
    except csv.Error as error:
        missing = f'is a quote (") missing there or above? ({error})'
        raise InputError(f"{where}line {lines.line_num} cannot be read; {missing}") from None


def _asked(table: Path, names: Cells, asked: str, option: str) -> str:
    """Returns the column of a name, or of a number from 1."""
    if (name := asked.strip().lower()) in names:
        return name
    if name.isdecimal() and 0 < int(name) <= len(names):
        return list(names)[int(name) - 1]
    hint = closest(asked, names.values()) or f"it has {shown(names.values())}"
    raise InputError(f"{option} {asked}: table {table} has no such column; {hint}")
