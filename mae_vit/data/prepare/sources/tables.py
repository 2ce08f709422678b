"""Tables of images as CSV or TSV: a column of files, which lie beside the table or below, and one of labels."""

from __future__ import annotations

import csv
import io
import shlex
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

from mae_vit.core.errors import InputError
from mae_vit.core.messages import closest, count_of, plain_text
from mae_vit.core.user_files import (
    ARCHIVE_EXTENSIONS,
    decode_text,
    extension_of,
    is_image,
    read_text,
    split_named,
    split_told,
)
from mae_vit.data.prepare.entries import Entry, ImageSource, unique_key
from mae_vit.data.prepare.label_lists import Names, stem_of
from mae_vit.data.prepare.listing import shown
from mae_vit.data.prepare.sources.folders import is_regular, reader, walk
from mae_vit.data.prepare.sources.parquet_columns import LABEL_NAMES, ParquetOptions
from mae_vit.data.shards.samples import label_number, no_single_label

_PATHS = ("path", "file", "filename", "file_name", "filepath", "image", "image_path", "img")
# So many rows tell a column of files by the files that are there.
_LOOKED_AT = 8
_FIRST_LINE = 4096
# The latter is fastai's.
_SPLITS = ("split", "is_valid")
_BITS = {"0": 0, "0.0": 0, "false": 0, "1": 1, "1.0": 1, "true": 1}


class Row(NamedTuple):
    """A row: `file` is None if it is not there, `label` and `split` of no column or an empty cell."""

    path: str
    file: Path | None
    label: str | None
    split: str | None


class Table(NamedTuple):
    """The rows of a table that name a file, and remarks on the others and on its columns."""

    rows: list[Row]
    notes: list[str]


class _Files:
    """The images of a folder, found by their paths, or by names that tell neither folder nor extension.

    Attributes:
        elsewhere: folders at the beginning of all paths, which may be those of another machine.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.elsewhere: tuple[str, ...] = ()

    @cached_property
    def _below(self) -> Names:
        paths = (file.relative_to(self._folder).as_posix() for file in walk(self._folder))
        return Names(path for path in paths if is_image(path))

    def find(self, path: str) -> Path | None:
        """Returns the one file that is meant; None of none or several, and of an address."""
        if "://" in path:
            return None
        path = path.replace("\\", "/")
        if is_regular(self._folder / path):
            return self._folder / path
        for cut in ("/".join(self.elsewhere[:count]) for count in range(len(self.elsewhere) + 1)):
            if found := self._below.find(path.removeprefix(cut).lstrip("/") if cut else path):
                return self._folder / found
        return None

    def hint(self, missing: Sequence[str], all_missing: bool) -> str:
        """Says where files may be that are not found."""
        names = sorted(file.name for file in self._folder.iterdir() if file.is_file())
        if any("://" in path for path in missing):
            return ": download them first"
        if archives := [name for name in names if extension_of(name) in ARCHIVE_EXTENSIONS]:
            return f": unpack {shown(archives)} first, which may hold them"
        there = self._below.shown() if all_missing else ""
        return f"; there are {there}" if there else ""


def _shared_folders(paths: Iterable[str]) -> tuple[str, ...]:
    """The folders at the beginning of all paths, up to one that is called like a split; none of addresses."""
    parts = [tuple(path.replace("\\", "/").split("/")[:-1]) for path in paths]
    if not parts or any("//" in path for path in paths):
        return ()
    shared = takewhile(
        lambda names: len(set(names)) == 1 and not split_named(names[0]), zip(*parts, strict=False)
    )
    return tuple(names[0] for names in shared)


def is_table(path: Path) -> bool:
    """Whether a file is called as tables are that are read here, or is a text whose first line has columns by tabs."""
    extension = extension_of(path.name)
    if extension != "txt" or not path.is_file():
        return extension in ("csv", "tsv") and path.is_file()
    # What Excel calls Unicode text.
    with path.open("rb") as file:
        return "\t" in decode_text(file.read(_FIRST_LINE), "", errors="replace").partition("\n")[0]


def read_table(table: Path, options: ParquetOptions | None = None, *, labels: bool = True) -> Table:
    """Reads the rows of a table.

    Args:
        table: the file.
        options: the columns that the user names.
        labels: whether labels are read.

    Raises:
        InputError: if it has no column of files, several that may be meant, or is no text.
    """
    columns, rows = _read(table)
    files = _Files(table.parent)
    path, label = _chosen_columns(table, columns, rows, files, options or ParquetOptions(), labels)
    split, notes = next((name for name in _SPLITS if name in columns), None), []
    if split == "is_valid":
        notes.append(f"took the rows of {table.name} whose is_valid is true for val, the others for train")
    if without := sum(not row[path] for row in rows):
        notes.append(f"left out {count_of(without, 'row')} of {table.name} that name no file")
    rows = [row for row in rows if row[path]]
    # Where some are found as they are named, others are missing.
    if not any(files.find(row[path]) for row in rows):
        files.elsewhere = _shared_folders(row[path] for row in rows)
    others = [name for name in columns if name not in (path, label, split)]
    hot, remarks = _one_hot(others, path, columns, rows) if labels and not label else ([], [])
    notes += remarks
    if others := [name for name in others if name not in hot]:
        way = f" (for labels, mae-vit prepare {shlex.quote(str(table))} OUT --label-column NAME)"
        unread = shown(columns[name] for name in others)
        notes.append(
            f"columns of {table.name} that are not read: {unread}{way if labels and not (label or hot) else ''}"
        )

    def label_of(row: Mapping[str, str]) -> str | None:
        return columns[_ones(row, hot)[0]] if hot else (row[label] or None) if label else None

    def split_of(cell: str) -> str | None:
        return ("val" if _BITS.get(cell.lower()) else "train") if split == "is_valid" else cell or None

    return Table(
        [
            Row(row[path], files.find(row[path]), label_of(row), split_of(row[split]) if split else None)
            for row in rows
        ],
        notes,
    )


def _read(table: Path) -> tuple[dict[str, str], list[dict[str, str]]]:
    """The columns, by their names in lower case, as they are written; and the cells of each row, by the same names."""
    text = read_text(table)
    delimiter = max("\t", ";", ",", key=text.partition("\n")[0].count)
    reading = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)
    try:
        written = [name.strip() for name in next(reading, [])]
        rows = [[cell.strip() for cell in row] for row in reading]
    except csv.Error as error:
        raise InputError(f"table {table}: line {reading.line_num} cannot be read: {error}") from None
    places = {name.lower(): place for place, name in enumerate(written) if name}
    if len(places) < sum(map(bool, written)):
        raise InputError(f"table {table}: two columns have one name ({shown(written)}): rename one")
    found = [
        {name: row[place] if place < len(row) else "" for name, place in places.items()}
        for row in rows
        if any(row)
    ]
    return {name: written[place] for name, place in places.items()}, found


def _chosen_columns(
    table: Path,
    columns: Mapping[str, str],
    rows: Sequence[Mapping[str, str]],
    files: _Files,
    options: ParquetOptions,
    labels: bool,
) -> tuple[str, str | None]:
    """The columns of paths and of labels.

    Raises:
        InputError: if they are not clear, with the command that chooses.
    """

    def chosen(asked: str | None, option: str, found: list[str]) -> str | None:
        if asked is None:
            return found[0] if len(found) == 1 else None
        if (name := asked.strip().lower()) not in columns:
            raise InputError(
                f"{option} {asked}: table {table} has no such column: "
                f"{closest(asked, columns.values()) or 'it has ' + shown(columns.values())}"
            )
        return name

    def holds_files(name: str) -> bool:
        cells = [row[name] for row in rows[:_LOOKED_AT]]
        return bool(cells) and all(path and files.find(path) for path in cells)

    if any(is_image(name) and files.find(name) for name in columns.values()):
        raise InputError(
            f"table {table}: its first line names an image: put a line of names above it, as path,label"
        )
    paths, named = ([name for name in columns if name in known] for known in (_PATHS, LABEL_NAMES))
    if len(paths) != 1 and not options.image_column:
        paths = [name for name in paths or columns if name not in named and holds_files(name)]
    path = chosen(options.image_column, "--image-column", paths)
    label = chosen(options.label_column, "--label-column", named) if labels else None
    why, option = [], ""
    if path is None:
        why.append(f"{'several columns name' if paths else 'no column names'} images beside it or below")
        option += f" --image-column {shlex.quote(columns[paths[0]]) if paths else 'NAME'}"
    if labels and label is None and len(named) > 1:
        why.append("several columns may be labels")
        option += f" --label-column {shlex.quote(columns[named[0]])}"
    if path is None or why:
        listed = plain_text(", ".join(columns.values())[:80])
        raise InputError(
            f"table {table}: {' and '.join(why)}: its first line has {listed}; "
            f"mae-vit prepare {shlex.quote(str(table))} OUT{option} chooses"
        )
    return path, label


def _one_hot(
    names: Sequence[str], path: str, columns: Mapping[str, str], rows: Sequence[Mapping[str, str]]
) -> tuple[list[str], list[str]]:
    """The columns that are one label, since each row has a single 1 in them; and a remark on columns of 0 and 1."""
    bits = [name for name in names if all(row[name].lower() in _BITS for row in rows)]
    if len(bits) < 2 or not rows:
        return [], []
    listed = shown(columns[name] for name in bits)
    odd = next((row for row in rows if len(_ones(row, bits)) != 1), None)
    if odd is None:
        return bits, [f"took columns with a single 1 in each row for the labels: {listed}"]
    return [], [
        f"columns {listed} of 0 and 1 are not one label: {plain_text(odd[path])} has {len(_ones(odd, bits)) or 'no'} "
        "ones, and one class of each image is read (multi-label tables are not supported)"
    ]


def _ones(row: Mapping[str, str], columns: Sequence[str]) -> list[str]:
    return [name for name in columns if _BITS[row[name].lower()]]


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
    found = read_table(table, options, labels=labels)
    entries, missing = [], [row.path for row in found.rows if row.file is None]
    label_of: dict[tuple[str, Path], str | None] = {}
    keys: dict[str, dict[str, int]] = {}
    repeated, below, example = 0, 0, ""
    folders, notes = _splits_of_folders(found.rows, table, split)
    signed = {label_number((row.label or "x").encode()) for row in found.rows} == {-1, 1}
    if signed:
        notes.append(f"took the labels 1 and -1 of {table.name} for two classes, since there are no others")
    for (path, file, label, told), of_folder in zip(found.rows, folders, strict=True):
        if file is None:
            continue
        name, own = _class_name(label, signed=signed), split_told(told) if told else of_folder
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
        where = _where(path, file, table)
        if where != path.replace("\\", "/").removeprefix("./"):
            below, example = below + 1, example or f"{plain_text(path)} is {plain_text(where)}"
        key = unique_key(
            stem_of(where).replace(".", "_").strip("/") or where,
            keys.setdefault(own, {}),
        )
        entries.append(Entry(own, name, key, where, extension_of(where) or "jpg", reader(file)))
    if missing:
        hint = _Files(table.parent).hint(missing, not entries)
        notes.append(
            f"{count_of(len(missing), 'file')} of {table.name} not found beside it: {shown(missing)}{hint}"
        )
    if below:
        notes.append(
            f"found {count_of(below, 'file')} of {table.name} by the ends of their paths (folder, case or extension "
            f"differ): {example}"
        )
    if repeated:
        notes.append(f"{table.name} names images again in {count_of(repeated, 'row')}: each is taken once")
    if shared := len(label_of) - len({file for _, file in label_of}):
        notes.append(f"warning: {table.name} has {count_of(shared, 'image')} in several splits")
    unlabeled = sum(entry.class_name is None for entry in entries)
    if 0 < unlabeled < len(entries):
        notes.append(f"{count_of(unlabeled, 'image')} without a label: its cell is empty or negative")
    names = {entry.class_name for entry in entries if entry.class_name is not None}
    numbers = {name: label_number(name.encode()) for name in names}
    # Numbers in their order, as of other sources; words by the alphabet.
    classes = (
        sorted(names, key=lambda name: (numbers[name] or 0, name)) if None not in numbers.values() else []
    )
    return ImageSource(table.name, entries, classes=tuple(classes) or None, notes=(*notes, *found.notes))


def _where(path: str, file: Path, table: Path) -> str:
    """The path of a row's file beside its table."""
    return file.relative_to(table.parent).as_posix() if file.is_relative_to(table.parent) else path


def _splits_of_folders(rows: Sequence[Row], table: Path, split: str) -> tuple[list[str], list[str]]:
    """The split of each row that tells none: of the folder that it lies in where there are several; and remarks."""
    found = [
        next(filter(None, map(split_named, _where(row.path, row.file, table).split("/")[:-1])), None)
        if row.file and not row.split
        else None
        for row in rows
    ]
    there = sorted({name for name in found if name})
    if len(there) > 1:
        remark = f"took the splits of {table.name} from the folders of its images: {', '.join(there)}"
        return [name or split for name in found], [f"{remark} (a column split tells others)"]
    remarks = (
        [
            f"all images of {table.name} lie in the folder of split {there[0]}, but were taken for {split} (--split "
            f"{there[0]} takes them for it)"
        ]
        if there and there[0] != split and None not in found
        else []
    )
    return [split] * len(rows), remarks


def _class_name(label: str | None, *, signed: bool) -> str | None:
    """The class that a cell names: whole numbers without decimals, as pandas writes those with gaps; not negative.

    Args:
        label: of the cell.
        signed: negative numbers are classes, too.
    """
    name = plain_text(unicodedata.normalize("NFC", label or ""))
    if (number := label_number(name.encode())) is not None:
        return name.partition(".")[0] if number >= 0 or signed else None
    return name or None
