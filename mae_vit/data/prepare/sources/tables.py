"""Tables of images as CSV or TSV: a column of files, which lie beside the table or below, and one of labels."""

from __future__ import annotations

import csv
import io
import shlex
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

from mae_vit.core.errors import InputError
from mae_vit.core.messages import closest, count_of, plain_text
from mae_vit.core.user_files import (
    ARCHIVE_EXTENSIONS,
    LABEL_NAMES,
    decode_text,
    extension_of,
    is_image,
    read_text,
    split_named,
    split_told,
)
from mae_vit.data.prepare.entries import (
    Entry,
    ImageSource,
    SourceOptions,
    class_text,
    unique_key,
    without_label_note,
)
from mae_vit.data.prepare.label_lists import Names, stem_of
from mae_vit.data.prepare.listing import shown
from mae_vit.data.prepare.sources.folders import is_regular, reader, walk
from mae_vit.data.shards.samples import label_number, no_single_label

_PATHS = ("path", "file", "filename", "file_name", "filepath", "image", "image_path", "img")
# So many rows tell a column of files by the files that are there.
_LOOKED_AT = 8
_FIRST_LINE = 4096
# The latter is fastai's.
_SPLITS = ("split", "is_valid")
_DEFAULTS = SourceOptions(Path())
_BITS = {"0": 0, "0.0": 0, "false": 0, "1": 1, "1.0": 1, "true": 1}


class Row(NamedTuple):
    """A row that names a file: `file` is None if it is not there; label and split are "" where there is none."""

    path: str
    file: Path | None
    label: str
    split: str


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
        if not all_missing:
            return ""
        there = self._below.shown()
        return f"; there are {there}" if there else self.beside(missing)

    def beside(self, names: Iterable[str]) -> str:
        """Says which folder beside that of the table has images of these names, and what to do; "" if none has."""
        stems = {stem_of(name.replace("\\", "/").rpartition("/")[2]) for name in names}
        with suppress(OSError):  # folders may be another user's
            for folder in sorted(filter(Path.is_dir, self._folder.resolve().parent.iterdir())):
                if any(is_image(file.name) and stem_of(file.name) in stems for file in folder.iterdir()):
                    return f"; {folder} has images of these names: if they are meant, move the table there"
        return ""


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


def read_table(table: Path, options: SourceOptions = _DEFAULTS) -> Table:
    """Reads the rows of a table.

    Args:
        table: the file.
        options: the columns that the user names.

    Raises:
        InputError: if it has no column of files, several that may be meant, or is no text.
    """
    name, files = table.name, _Files(table.parent)
    columns, cells = _read(table)
    path, label = _choose_columns(table, columns, cells, files, options)
    split, notes = next((column for column in _SPLITS if column in columns), None), list[str]()
    if split == "is_valid":
        notes.append(f"took the rows of {name} whose is_valid is true for val, the others for train")
    if without := sum(not row[path] for row in cells):
        notes.append(f"left out {count_of(without, 'row')} of {name} that name no file")
    cells = [row for row in cells if row[path]]
    # Where some are found as they are named, others are missing.
    if not any(files.find(row[path]) for row in cells):
        files.elsewhere = _shared_folders(row[path] for row in cells)
    unread = [column for column in columns if column not in (path, label, split)]
    hot: list[str] = []
    if options.labels and not label:
        hot, remarks = _one_hot(unread, path, columns, cells)
        notes += remarks
    if unread := [column for column in unread if column not in hot]:
        hint = f" (for labels, mae-vit prepare {shlex.quote(str(table))} OUT --label-column NAME)"
        listed = shown(columns[column] for column in unread)
        notes.append(
            f"columns of {name} that are not read: {listed}{hint if options.labels and not (label or hot) else ''}"
        )
    rows = []
    for row in cells:
        told = row[split] if split else ""
        if split == "is_valid":
            told = "val" if _BITS.get(told.lower()) else "train"
        named = columns[_ones(row, hot)[0]] if hot else row[label] if label else ""
        rows.append(Row(row[path], files.find(row[path]), named, told))
    return Table(rows, notes)


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


def _choose_columns(
    table: Path,
    columns: Mapping[str, str],
    cells: Sequence[Mapping[str, str]],
    files: _Files,
    options: SourceOptions,
) -> tuple[str, str | None]:
    """Returns the columns of paths and of labels.

    Raises:
        InputError: if they are not clear, with the command that chooses.
    """
    if any(is_image(name) and files.find(name) for name in columns.values()):
        raise InputError(
            f"table {table}: its first line names an image: put a line of names above it, as path,label"
        )
    paths, labels = ([name for name in columns if name in known] for known in (_PATHS, LABEL_NAMES))
    if options.image_column:
        paths = [_asked_column(table, columns, options.image_column, "--image-column")]
    elif len(paths) != 1:
        paths = [name for name in paths or columns if name not in labels and _holds_files(name, cells, files)]
    if options.label_column:
        labels = [_asked_column(table, columns, options.label_column, "--label-column")]
    labels = labels if options.labels else []
    why, command = [], ""
    if len(paths) != 1:
        why.append(f"{'several columns name' if paths else 'no column names'} images beside it or below")
        command += f" --image-column {shlex.quote(columns[paths[0]]) if paths else 'NAME'}"
    if len(labels) > 1:
        why.append("several columns may be labels")
        command += f" --label-column {shlex.quote(columns[labels[0]])}"
    if why:
        listed = plain_text(", ".join(columns.values())[:80])
        near = "" if paths else files.beside(cell for row in cells[:_LOOKED_AT] for cell in row.values())
        raise InputError(
            f"table {table}: {' and '.join(why)}: its first line has {listed}; "
            f"mae-vit prepare {shlex.quote(str(table))} OUT{command} chooses{near}"
        )
    return paths[0], labels[0] if labels else None


def _asked_column(table: Path, columns: Mapping[str, str], asked: str, option: str) -> str:
    if (name := asked.strip().lower()) not in columns:
        hint = closest(asked, columns.values()) or f"it has {shown(columns.values())}"
        raise InputError(f"{option} {asked}: table {table} has no such column: {hint}")
    return name


def _holds_files(name: str, cells: Sequence[Mapping[str, str]], files: _Files) -> bool:
    """Whether the first cells of a column name files."""
    first = [row[name] for row in cells[:_LOOKED_AT]]
    return bool(first) and all(path and files.find(path) for path in first)


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


def open_table(table: Path, options: SourceOptions) -> ImageSource:
    """Opens the images that a table lists; those that are not there are counted and named.

    Args:
        table: the file.
        options: the columns that the user names, and the split of rows that tell none.

    Raises:
        InputError: as of `read_table`, or if an image has several labels.
    """
    rows, column_notes = read_table(table, options)
    entries, missing = list[Entry](), [row.path for row in rows if row.file is None]
    label_of: dict[tuple[str, Path], str | None] = {}
    keys: dict[str, dict[str, int]] = {}
    below = list[str]()
    folders, notes = _splits_of_folders(rows, table, options.split)
    signed = {label_number((row.label or "x").encode()) for row in rows} == {-1, 1}
    if signed:
        notes.append(f"took the labels 1 and -1 of {table.name} for two classes, since there are no others")
    for (path, file, label, told), folder_split in zip(rows, folders, strict=True):
        if file is None:
            continue
        name, split = _class_name(label, signed=signed), split_told(told) if told else folder_split
        twice = (split, file) in label_of
        other = label_of.setdefault((split, file), name)
        if other != name or (name and no_single_label(name.encode())):
            both = f'"{other}" and "{name}"' if other != name else f'"{name}"'
            raise InputError(
                f"table {table}: the label of {plain_text(path)} is {both}: one class of each image is read; "
                "mae-vit prepare --no-labels takes the images alone"
            )
        if twice:
            continue
        where = _beside(path, file, table)
        if where != path.replace("\\", "/").removeprefix("./"):
            below.append(f"{plain_text(path)} is {plain_text(where)}")
        stem = stem_of(where).replace(".", "_").strip("/") or where
        key = unique_key(stem, keys.setdefault(split, {}))
        entries.append(Entry(split, name, key, where, extension_of(where) or "jpg", reader(file)))
    if missing:
        hint = _Files(table.parent).hint(missing, not entries)
        count = count_of(len(missing), "file")
        notes.append(f"{count} of {table.name} not found beside it: {shown(missing)}{hint}")
    if below:
        notes.append(
            f"found {count_of(len(below), 'file')} of {table.name} by the ends of their paths (folder, case or "
            f"extension differ): {below[0]}"
        )
    if repeated := len(rows) - len(missing) - len(entries):
        notes.append(f"{table.name} names images again in {count_of(repeated, 'row')}: each is taken once")
    if shared := len(label_of) - len({file for _, file in label_of}):
        notes.append(f"warning: {table.name} has {count_of(shared, 'image')} in several splits")
    unlabeled = sum(entry.class_name is None for entry in entries)
    if unlabeled < len(entries):
        notes += without_label_note(unlabeled, "its cell is empty or negative")
    numbers = {
        name: label_number(name.encode()) for entry in entries if (name := entry.class_name) is not None
    }
    # Numbers in their order, as of other sources; words by the alphabet.
    words = None in numbers.values()
    classes = () if words else sorted(numbers, key=lambda name: (numbers[name] or 0, name))
    return ImageSource(table.name, entries, classes=tuple(classes) or None, notes=(*notes, *column_notes))


def _beside(path: str, file: Path, table: Path) -> str:
    """The path of a row's file beside its table."""
    return file.relative_to(table.parent).as_posix() if file.is_relative_to(table.parent) else path


def _splits_of_folders(rows: Sequence[Row], table: Path, split: str) -> tuple[list[str], list[str]]:
    """The split of each row that tells none: of the folder that it lies in where there are several; and remarks."""
    told = []
    for row in rows:
        folders = _beside(row.path, row.file, table).split("/")[:-1] if row.file and not row.split else []
        told.append(next(filter(None, map(split_named, folders)), None))
    there = sorted({name for name in told if name})
    if len(there) > 1:
        listed = ", ".join(there)
        remark = f"took the splits of {table.name} from the folders of its images: {listed}"
        return [name or split for name in told], [f"{remark} (a column split tells others)"]
    remarks = []
    if there and there[0] != split and None not in told:
        remarks.append(
            f"all images of {table.name} lie in the folder of split {there[0]}, but were taken for {split} (--split "
            f"{there[0]} takes them for it)"
        )
    return [split] * len(rows), remarks


def _class_name(label: str, *, signed: bool) -> str | None:
    """The class that a cell names: whole numbers without decimals, as pandas writes those with gaps; not negative.

    Args:
        label: of the cell.
        signed: negative numbers are classes, too.
    """
    name = class_text(label)
    if (number := label_number(name.encode())) is not None:
        return name.partition(".")[0] if number >= 0 or signed else None
    return name or None
