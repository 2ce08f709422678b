"""Tables of images as CSV or TSV: a column of paths, relative to the table, and one of labels."""

from __future__ import annotations

import csv
import io
import re
import unicodedata
from collections.abc import Iterator
from pathlib import Path

from mae_vit.core.errors import InputError
from mae_vit.core.messages import count_of, plain_text
from mae_vit.core.user_files import extension_of, read_text, split_named
from mae_vit.data.prepare.entries import Entry, ImageSource, shown, unique_key
from mae_vit.data.prepare.sources.folders import is_regular, reader
from mae_vit.data.prepare.sources.parquet_columns import LABEL_NAMES

_PATHS = ("path", "file", "filename", "file_name", "filepath", "image", "image_path", "img")


def is_table(path: Path) -> bool:
    """Whether a file is called as tables are that are read here."""
    return extension_of(path.name) in ("csv", "tsv") and path.is_file()


def table_rows(table: Path) -> Iterator[tuple[str, str | None, str | None]]:
    """Yields the path, the label and the split of each row; None of a column that is not there or an empty cell.

    Raises:
        InputError: if it has no column of paths, several that may be meant, or is no text.
    """
    text = read_text(table)
    delimiter = max("\t", ";", ",", key=text.partition("\n")[0].count)
    rows = csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter)
    columns = {(name or "").strip().lower(): name for name in rows.fieldnames or ()}
    paths, labels = ([name for name in columns if name in known] for known in (_PATHS, LABEL_NAMES))
    if len(paths) != 1 or len(labels) > 1:
        raise InputError(
            f"table {table}: one column of paths ({', '.join(_PATHS[:4])} ...) and at most one of labels "
            f"({', '.join(LABEL_NAMES[:3])} ...) is read; its first line has {plain_text(', '.join(columns)[:80])}"
        )
    wanted = [columns.get(name) for name in (paths[0], labels[0] if labels else "", "split")]
    for row in rows:
        path, label, split = ((row.get(name) or "").strip() or None if name else None for name in wanted)
        if path:
            yield path, label, split


def open_table(table: Path, split: str) -> ImageSource:
    """Opens the images that a table lists; those that are not there are counted and named.

    Args:
        table: the file.
        split: of rows that tell none.

    Raises:
        InputError: as of `table_rows`.
    """
    entries, missing, unlabeled = [], list[str](), 0
    keys: dict[str, dict[str, int]] = {}
    for path, label, told in table_rows(table):
        file = table.parent / path.replace("\\", "/")
        if not is_regular(file):
            missing.append(path)
            continue
        own = (split_named(told) or re.sub(r"\W", "_", told)) if told else split
        key = unique_key(
            path.rpartition(".")[0].replace("\\", "/").replace(".", "_").strip("/") or path,
            keys.setdefault(own, {}),
        )
        unlabeled += label is None
        name = None if label is None else plain_text(unicodedata.normalize("NFC", label))
        entries.append(Entry(own, name, key, path, extension_of(path) or "jpg", reader(file)))
    notes = []
    if missing:
        notes.append(
            f"{count_of(len(missing), 'file')} of {table.name} not found beside it: {shown(missing)}"
        )
    if 0 < unlabeled < len(entries):
        notes.append(f"{count_of(unlabeled, 'image')} without a label: its cell is empty")
    return ImageSource(table.name, entries, notes=tuple(notes))
