"""Tables of images as CSV or TSV: a column of files, which lie beside the table or below, and one of labels."""

from __future__ import annotations

import csv
import io
import unicodedata
from collections import defaultdict
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, NoReturn

from mae_vit.core.errors import InputError
from mae_vit.core.messages import closest, count_of, plain_text
from mae_vit.core.user_files import IMAGE_EXTENSIONS, extension_of, is_image, read_text, split_told
from mae_vit.data.prepare.entries import Entry, ImageSource, shown, unique_key
from mae_vit.data.prepare.sources.folders import is_regular, reader, walk
from mae_vit.data.prepare.sources.parquet_columns import LABEL_NAMES, ParquetOptions
from mae_vit.data.shards.samples import no_single_label

_PATHS = ("path", "file", "filename", "file_name", "filepath", "image", "image_path", "img")
# So many rows tell a column of files by the files that are there.
_LOOKED_AT = 8


class Row(NamedTuple):
    """A row: `file` is None if it is not there, `label` and `split` of no column or an empty cell."""

    path: str
    file: Path | None
    label: str | None
    split: str | None


class Table(NamedTuple):
    """The rows of a table, and the names of the columns that are not read."""

    rows: list[Row]
    label: str | None
    others: list[str]


class _Files:
    """The images of a folder, found by their paths, or by names that tell neither folder nor extension."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @cached_property
    def _below(self) -> dict[str, list[Path]]:
        found = defaultdict(list)
        for file in walk(self._folder):
            if is_image(file.relative_to(self._folder).as_posix()):
                found[_stem(file.name)].append(file)
        return found

    def find(self, path: str) -> Path | None:
        """Returns the one file that is meant; None of none or several."""
        path = path.replace("\\", "/")
        if is_regular(self._folder / path):
            return self._folder / path
        wanted = f"/{path.removeprefix('./')}"
        found = [
            file
            for file in self._below.get(_stem(path.rpartition("/")[2]), ())
            if wanted in (name := f"/{file.relative_to(self._folder).as_posix()}", _stem(name))
            or ("/" not in path and wanted[1:] in (file.name, _stem(file.name)))
        ]
        return found[0] if len(found) == 1 else None


def _stem(name: str) -> str:
    """A name without the extension of an image; what else follows a dot is of the name."""
    return name.rpartition(".")[0] if extension_of(name) in IMAGE_EXTENSIONS else name


def is_table(path: Path) -> bool:
    """Whether a file is called as tables are that are read here."""
    return extension_of(path.name) in ("csv", "tsv") and path.is_file()


def read_table(table: Path, options: ParquetOptions | None = None) -> Table:
    """Reads the rows of a table.

    Args:
        table: the file.
        options: the columns that the user names.

    Raises:
        InputError: if it has no column of files, several that may be meant, or is no text.
    """
    options = options or ParquetOptions()
    text = read_text(table)
    delimiter = max("\t", ";", ",", key=text.partition("\n")[0].count)
    reading = csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter)
    columns = {(name or "").strip().lower(): name for name in reading.fieldnames or ()}
    rows, files = list(reading), _Files(table.parent)

    def cell(row: dict[str, str], name: str | None) -> str | None:
        return (row.get(columns[name]) or "").strip() or None if name else None

    def chosen(asked: str | None, option: str, found: list[str]) -> str | None:
        if asked is None:
            return found[0] if len(found) == 1 else None
        if (name := asked.strip().lower()) not in columns:
            raise InputError(
                f"{option} {asked}: table {table} has no such column: "
                f"{closest(asked, [*columns]) or 'it has ' + shown(filter(None, columns))}"
            )
        return name

    def holds_files(name: str) -> bool:
        cells = [cell(row, name) for row in rows[:_LOOKED_AT]]
        return bool(cells) and all(path and files.find(path) for path in cells)

    if any(is_image(name) and files.find(name) for name in map(str, columns.values())):
        raise InputError(
            f"table {table}: its first line names an image: put a line of names above it, as path,label"
        )
    paths, labels = ([name for name in columns if name in known] for known in (_PATHS, LABEL_NAMES))
    if len(paths) != 1 and not options.image_column:
        paths = [name for name in paths or columns if name not in labels and holds_files(name)]
    path = chosen(options.image_column, "--image-column", paths)
    label = chosen(options.label_column, "--label-column", labels)
    if path is None or (label is None and len(labels) > 1):
        _ask(table, list(columns))
    wanted = (path, label, "split" if "split" in columns else None)
    others = [name for name in columns if name and name not in wanted]
    found = [
        Row(where, files.find(where), cell(row, label), cell(row, wanted[2]))
        for row in rows
        if (where := cell(row, path))
    ]
    return Table(found, label, others)


def _ask(table: Path, columns: list[str]) -> NoReturn:
    raise InputError(
        f"table {table}: one column of paths ({', '.join(_PATHS[:4])} ...) and at most one of labels "
        f"({', '.join(LABEL_NAMES[:3])} ...) is read; its first line has {plain_text(', '.join(columns)[:80])}: "
        "rename them, or mae-vit prepare --image-column NAME --label-column NAME"
    )


def open_table(
    table: Path, split: str, options: ParquetOptions | None = None, *, labels: bool = True
) -> ImageSource:
    """Opens the images that a table lists; those that are not there are counted and named.

    Args:
        table: the file.
        split: of rows that tell none.
        options: the columns that the user names.
        labels: whether labels are read.

    Raises:
        InputError: as of `read_table`, or if an image has several labels.
    """
    found = read_table(table, options)
    entries, missing = [], [row.path for row in found.rows if row.file is None]
    label_of: dict[tuple[str, Path], str | None] = {}
    keys: dict[str, dict[str, int]] = {}
    repeated = below = 0
    for path, file, label, told in found.rows:
        if file is None:
            continue
        name = None if label is None or not labels else plain_text(unicodedata.normalize("NFC", label))
        own = split_told(told) if told else split
        twice = (own, file) in label_of
        other = label_of.setdefault((own, file), name)
        if other != name or (name and no_single_label(name.encode())):
            both = f'"{other}" and "{name}"' if other != name else f'"{name}"'
            raise InputError(
                f"table {table}: the label of {plain_text(path)} is {both}: one class of each image is read; "
                "mae-vit prepare --no-labels takes the images alone"
            )
        repeated += twice
        if twice:
            continue
        where = file.relative_to(table.parent).as_posix() if file.is_relative_to(table.parent) else path
        below += where != path.replace("\\", "/").removeprefix("./")
        key = unique_key(
            _stem(where).replace(".", "_").strip("/") or where,
            keys.setdefault(own, {}),
        )
        entries.append(Entry(own, name, key, where, extension_of(where) or "jpg", reader(file)))
    notes = []
    if missing:
        notes.append(
            f"{count_of(len(missing), 'file')} of {table.name} not found beside it: {shown(missing)}"
            + (": download them first" if any("://" in path for path in missing) else "")
        )
    if below:
        notes.append(f"found {count_of(below, 'file')} of {table.name} by names without folder or extension")
    if repeated:
        notes.append(f"{table.name} names images again in {count_of(repeated, 'row')}: each is taken once")
    unlabeled = sum(entry.class_name is None for entry in entries)
    if 0 < unlabeled < len(entries):
        notes.append(f"{count_of(unlabeled, 'image')} without a label: its cell is empty")
    if found.others:
        way = "" if found.label or not labels else " (--label-column NAME takes one for the labels)"
        notes.append(f"columns of {table.name} that are not read: {shown(found.others)}{way}")
    return ImageSource(table.name, entries, notes=tuple(notes))
