"""Reads CSV or TSV tables of images: a column of files beside the table or below, and a column of labels."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote

from mae_vit.core import user_files
from mae_vit.core.errors import InputError
from mae_vit.core.messages import count_of, plain_text
from mae_vit.data.prepare.columns import PATHS, find_all, read_columns
from mae_vit.data.prepare.entries import (
    Entry,
    ImageSource,
    SourceOptions,
    classes_of_cells,
    composed,
    ordered_classes,
    unique_key,
    without_label_note,
)
from mae_vit.data.prepare.label_lists import Names, image_stem, several_fit
from mae_vit.data.prepare.listing import shown
from mae_vit.data.prepare.sources.folders import is_regular, read_file, walk
from mae_vit.data.prepare.sources.rows import unread_note
from mae_vit.data.shards.samples import no_single_label

_FIRST_LINE = 4096
# Most files around a table's folder to look through.
_MOST_FILES = 200_000
_ABOVE = "copy the table into the folder above its images"


class Row(NamedTuple):
    """A row that names a file: `file` is None if it does not exist; label and split are "" if there is none."""

    path: str
    file: Path | None
    label: str
    split: str


class _Files:
    """Finds the images of a folder by path, or by names without folder or extension."""

    def __init__(self, table: Path) -> None:
        self._table = table

    @cached_property
    def _images(self) -> tuple[Path, list[str]]:
        """The images below the table's folder; if there are none, those of the folder around it, if it is not large."""
        top, files = self._table.parent, list(walk(self._table.parent))
        if not any(user_files.is_image(file.name) for file in files):
            around = self._table.resolve().parent.parent
            with suppress(OSError):
                more = list(islice(walk(around), _MOST_FILES))
                top, files = (around, more) if len(more) < _MOST_FILES else (top, files)
        every = (file.relative_to(top).as_posix() for file in files)
        return top, [path for path in every if user_files.is_image(path)]

    @cached_property
    def names(self) -> tuple[Names, Names]:
        """The images, and those in folders of the table's split, as train/ for trainLabels.csv."""
        paths, split = self._images[1], user_files.split_and_rest(self._table.stem)[0]
        own = (
            p
            for p in paths
            if split and split in (user_files.split_and_rest(part)[0] for part in p.split("/")[:-1])
        )
        return Names(paths), Names(own)

    def find(self, path: str, elsewhere: int = 0) -> Path | None:
        """Returns the only file that matches, as `Names.find` does; None if none or several do, and for a URL."""
        if "://" in path:
            return None
        path = path.replace("\\", "/")
        if is_regular(self._table.parent / path):
            return self._table.parent / path
        # Label Studio writes percent-encoded paths: /data/local-files/?d=my%20photos/1.jpg.
        before, _, encoded = path.rpartition("?d=")
        for name, cut in ((path, elsewhere), (unquote(encoded), max(0, elsewhere - before.count("/")))):
            if image := next(filter(None, (names.find(name, cut) for names in self.names)), None):
                return self._images[0] / image
        return None


def is_table(path: Path) -> bool:
    """Whether a file has a table's extension, or is a text whose first line has tabs, or words such as "path"."""
    extension = user_files.extension_of(path.name)
    if extension != "txt" or not path.is_file():
        return extension in ("csv", "tsv") and path.is_file()
    with path.open("rb") as file:
        line = user_files.decode_text(file.read(_FIRST_LINE), "", errors="replace").partition("\n")[0]
    # Excel exports tabs as "Unicode text".
    words = re.split(r"[\s,;]+", line.strip().lower())
    return "\t" in line or (len(words) > 1 and not set(PATHS).isdisjoint(words))


def read_table(table: Path, options: SourceOptions | None = None) -> tuple[list[Row], list[str]]:
    """Returns the rows of a table that name a file, and remarks on the others and on its columns.

    Raises:
        InputError: if it is no text, or if its columns are unclear.
    """
    options = options or SourceOptions(Path())
    name, files = table.name, _Files(table)

    def remedy(columns: Sequence[Sequence[str]]) -> str:
        if several := files.names[0].several_in(columns):
            return f": {several_fit(several, name)}"
        return f" next to it or below; {'add a column of their paths' if str(files.names[0]) else _ABOVE}"

    columns, cells = read_columns(table, options, files.find, labeled=False, remedy=remedy)
    notes = list[str]()
    if without := sum(not row[columns.image] for row in cells):
        notes.append(f"left out {count_of(without, 'row')} of {name} that give no file")
    cells = [row for row in cells if row[columns.image]]
    found = find_all(files.find, [row[columns.image] for row in cells])
    if columns.bits:
        listed = shown(columns.names[bit] for bit in columns.bits)
        notes.append(f"read columns with a single 1 in each row as labels: {listed}")
    notes += unread_note(name, columns.unread)
    rows = [
        Row(row[columns.image], file, columns.labels_of(row)[0], columns.split_of(row))
        for row, file in zip(cells, found, strict=True)
    ]
    lost = [row.path for row in rows if row.file is None]
    if several := [path for path in lost if files.names[0].are_several(path)]:
        notes.append(f"{several_fit(several, name)}, in a column of paths (--image-column)")
    if missing := [path for path in lost if not files.names[0].are_several(path)]:
        images = files.names[0]
        there = "" if len(lost) < len(rows) else f"; there are {images}" if str(images) else f": {_ABOVE}"
        count = count_of(len(missing), "file")
        notes.append(f"{count} of {name} not found next to it or below: {shown(missing)}{there}")
    return rows, notes


def open_table(table: Path, options: SourceOptions) -> ImageSource:
    """Opens the images that a table lists; a note counts and names those that do not exist.

    Raises:
        InputError: as for `read_table`, or if an image has several labels.
    """
    rows, column_notes = read_table(table, options)
    entries = list[Entry]()
    label_of: dict[tuple[str, Path], str | None] = {}
    keys: dict[str, dict[str, int]] = {}
    by_end = list[str]()
    folders, notes = _splits_of_folders(rows, table, options.split)
    class_of = classes_of_cells(row.label for row in rows)
    if "-1" in class_of.values():
        notes.append(f"read the labels 1 and -1 of {table.name} as two classes, since there are no others")
    for (path, file, label, split_text), folder_split in zip(rows, folders, strict=True):
        if file is None:
            continue
        name = class_of[label]
        split = user_files.split_told(split_text) if split_text else folder_split
        twice = (split, file) in label_of
        other = label_of.setdefault((split, file), name)
        # Lines in a label come of a quote that is not closed.
        if other != name or (name and ("\n" in label or no_single_label(name.encode()))):
            both = plain_text(f'"{other}" and "{name}"' if other != name else f'"{name}"')
            raise InputError(
                f"table {table}: the label of {path} is {both}, not a single class; give one class for each image, "
                "or use --no-labels"
            )
        if twice:
            continue
        where = _beside(path, file, table)
        if composed(where) != composed(path.replace("\\", "/").removeprefix("./")):
            by_end.append(f"{plain_text(path)} is {plain_text(where)}")
        stem = image_stem(where).replace(".", "_").strip("/") or where
        key = unique_key(stem, keys.setdefault(split, {}))
        extension = user_files.extension_of(where) or "jpg"
        entries.append(Entry(split, name, key, where, extension, partial(read_file, file)))
    if by_end:
        notes.append(
            f"found {count_of(len(by_end), 'file')} of {table.name} by the end of their paths (folder, case or "
            f"extension differ): {by_end[0]}"
        )
    if repeated := sum(row.file is not None for row in rows) - len(entries):
        notes.append(f"{table.name} lists images again in {count_of(repeated, 'row')}; each is used once")
    if shared := len(label_of) - len({file for _, file in label_of}):
        notes.append(f"warning: {table.name} has {count_of(shared, 'image')} in several splits")
    unlabeled = sum(entry.class_name is None for entry in entries)
    if unlabeled < len(entries):
        notes += without_label_note(unlabeled, "its cell is empty or negative")
    lost = {row.path: "not found" for row in rows if row.file is None}
    return ImageSource(table.name, entries, ordered_classes(entries), (*notes, *column_notes), left_out=lost)


def _beside(path: str, file: Path, table: Path) -> str:
    """Returns the path of a row's file relative to the table's folder, or to the one around it; else as written."""
    around = [] if Path(path).is_absolute() else [table.resolve().parent.parent]
    tops = (top for top in (table.parent, *around) if file.is_relative_to(top))
    return next((file.relative_to(top).as_posix() for top in tops), path)


def _splits_of_folders(rows: Sequence[Row], table: Path, split: str) -> tuple[list[str], list[str]]:
    """Returns the split of each row, from its folder if the folders are of several splits; and remarks."""
    splits = []
    for row in rows:
        folders = _beside(row.path, row.file, table).split("/")[:-1] if row.file and not row.split else []
        splits.append(next(filter(None, map(user_files.split_named, folders)), None))
    there = sorted({name for name in splits if name})
    if len(there) > 1:
        remark = f"read the splits of {table.name} from the folders of its images: {', '.join(there)}"
        return [name or split for name in splits], [f'{remark} (a column "split" overrides them)']
    if there and there[0] != split and None not in splits:
        return [split] * len(rows), [
            f"all images of {table.name} are in {there[0]}; did you mean --split {there[0]}?"
        ]
    return [split] * len(rows), []
