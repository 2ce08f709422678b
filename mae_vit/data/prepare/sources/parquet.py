"""Parquet files of images: columns of {bytes, path}, as data sets of the Hugging Face Hub have, or of bytes.

Compressed columns have no random access. So each file's row groups are read once, in order, into a hidden
folder of the output, from which images are then read in any order. Files that are read whole are not read
again after a kill. The folder goes when all is prepared.
"""

from __future__ import annotations

import hashlib
import json
import os
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path, PurePosixPath

from mae_vit.core.errors import InputError
from mae_vit.core.files import replacing, write_atomically
from mae_vit.core.messages import count_of, plain_text
from mae_vit.core.progress import progress
from mae_vit.core.user_files import split_told
from mae_vit.data.images.decode import DecodeError, check_bytes
from mae_vit.data.prepare.entries import Entry, ImageSource, unique_key
from mae_vit.data.prepare.listing import Reader
from mae_vit.data.prepare.sources.foreign_shards import split_of
from mae_vit.data.prepare.sources.parquet_columns import (
    Columns,
    ParquetOptions,
    choose_columns,
    parquet_library,
)
from mae_vit.data.prepare.sources.parquet_rows import (
    Row,
    holds_base64,
    opened_parquet,
    read_rows,
    write_row,
)
from mae_vit.data.shards.dataset_json import FILE_NAME, read_dataset

SPOOL = ".parquet"
# As of shards of others: a stranger's number must not make us write a list of billions of classes.
_MAX_CLASSES = 1_000_000


@dataclass(frozen=True)
class ParquetFile:
    """A file that is to be read.

    Attributes:
        name: its path in the source.
        split: of its images.
        identity: changes if its content does.
        fetch: brings it here for as long as it is read.
    """

    name: str
    split: str
    identity: str
    fetch: Callable[[], AbstractContextManager[Path]]


def find_parquet(folder: Path) -> list[Path]:
    """Returns the Parquet files below a folder, but for hidden ones."""
    found = (path for path in folder.rglob("*.parquet") if path.is_file())
    return sorted(path for path in found if not f"/{path.relative_to(folder)}".count("/."))


def local_files(paths: Sequence[Path], folder: Path, split: str) -> list[ParquetFile]:
    """Describes files of this machine; names and folders tell their splits, else `split` is."""
    files = []
    for path in paths:
        status = path.stat()
        identity = f"{path.resolve()}:{status.st_size}:{status.st_mtime_ns}"
        own = split_of(path, folder, split)
        files.append(
            ParquetFile(path.relative_to(folder).as_posix(), own, identity, partial(_in_place, path))
        )
    return files


@contextmanager
def _in_place(path: Path) -> Iterator[Path]:
    yield path


def open_parquet(
    files: Sequence[ParquetFile],
    out: Path,
    *,
    name: str,
    options: ParquetOptions,
    labels: bool = True,
    discard: Callable[[], None] = lambda: None,
) -> ImageSource:
    """Reads Parquet files into a hidden folder of `out`.

    Args:
        files: in the order of their images.
        out: the output folder.
        name: of the source.
        options: columns to read.
        labels: whether labels are read.
        discard: called when all is prepared.

    Raises:
        InputError: if a file is none, has no column of images, or its labels make no sense.
        FetchUnavailable: if one cannot be fetched now.
    """
    check_ready(files, out, options)
    folder = out / SPOOL
    places = [folder / _digest(file, options, labels) for file in files]

    def remove() -> None:
        for place in places:
            for suffix in (".bin", ".json"):
                place.with_suffix(suffix).unlink(missing_ok=True)
        for left in folder.glob(".*.tmp"):  # of a call that was killed
            left.unlink(missing_ok=True)
        discard()
        with suppress(OSError):
            folder.rmdir()

    try:
        folder.mkdir(parents=True, exist_ok=True)
        found = list(zip(files, places, strict=True))
        with progress(found, desc="reading", unit=" files", delay=2, leave=False) as bar:
            spooled = [_spooled(file, place, options, labels) for file, place in bar]
        source = _source(files, places, spooled, name)
    except InputError:
        remove()
        raise
    except BaseException:
        # What was read whole stays: the next call goes on behind it.
        with suppress(OSError):
            folder.rmdir()
        raise
    return replace(source, discard=remove)


def check_ready(files: Sequence[ParquetFile], out: Path, options: ParquetOptions) -> None:
    """Refuses what could only be refused when all is read otherwise.

    Raises:
        InputError: if pyarrow is not installed, or a split exists that is not to be replaced.
    """
    parquet_library()
    existing = read_dataset(out).splits if options.overwrite is False and (out / FILE_NAME).exists() else {}
    if taken := sorted({file.split for file in files} & existing.keys()):
        raise InputError(f'{out} already has split "{taken[0]}": --overwrite replaces it')


def _digest(file: ParquetFile, options: ParquetOptions, labels: bool) -> str:
    inputs = [file.identity, options.image_column, options.label_column, labels]
    return hashlib.blake2b(json.dumps(inputs).encode(), digest_size=12).hexdigest()


def _spooled(
    file: ParquetFile, place: Path, options: ParquetOptions, labels: bool
) -> tuple[Columns, list[Row]]:
    """Reads a file, unless an earlier call did."""
    record_file = place.with_suffix(".json")
    with suppress(OSError, ValueError, KeyError, TypeError):
        found = json.loads(record_file.read_text(encoding="utf-8"))
        columns = Columns(**found["columns"])
        names = tuple(columns.names) if columns.names is not None else None
        return replace(columns, names=names), [Row(*row) for row in found["rows"]]
    with file.fetch() as path, opened_parquet(path, file.name) as opened:
        columns = choose_columns(
            opened.schema_arrow,
            file.name,
            options,
            labels=labels,
            holds_base64=partial(holds_base64, opened),
        )
        with replacing(place.with_suffix(".bin")) as partial_path, partial_path.open("wb") as spool:
            rows = [write_row(row, spool) for row in read_rows(opened, columns)]
        # Last: it says that the images are there.
        record = {"columns": asdict(columns), "rows": [list(asdict(row).values()) for row in rows]}
        write_atomically(record_file, json.dumps(record).encode())
    return columns, rows


def _source(
    files: Sequence[ParquetFile],
    places: Sequence[Path],
    spooled: Sequence[tuple[Columns, list[Row]]],
    name: str,
) -> ImageSource:
    classes = _classes(files, spooled)
    entries, without = [], 0
    keys: dict[str, dict[str, int]] = {}
    for file, place, (columns, rows) in zip(files, places, spooled, strict=True):
        for number, row in enumerate(rows):
            where = f"{file.name}, row {number}"
            # The folder is another machine's, or hostile.
            image = PurePosixPath(row.path.replace("\\", "/")).name
            stem = image.rpartition(".")[0] or image or f"{PurePosixPath(file.name).stem}-{number:06d}"
            split = split_told(row.split) if row.split else file.split
            key = unique_key(stem.replace(".", "_"), keys.setdefault(split, {}))
            origin = f"{where} ({plain_text(image)})" if image else where
            class_name = _class_name(row.label, columns, where)
            without += columns.label is not None and class_name is None and not row.damage
            read = _reader(place.with_suffix(".bin"), row)
            entries.append(Entry(split, class_name, key, origin, row.extension or "jpg", read))
    notes = tuple(dict.fromkeys(columns.note for columns, _ in spooled if columns.note))
    if without:
        reason = "the column holds none, or a negative number"
        notes += (f"{count_of(without, 'image')} without a label: {reason}",)
    return ImageSource(name, entries, classes=classes, notes=notes)


def _classes(
    files: Sequence[ParquetFile], spooled: Sequence[tuple[Columns, list[Row]]]
) -> tuple[str, ...] | None:
    """All classes in their order, where the files give one: names of their own, or numbers.

    Raises:
        InputError: if files disagree.
    """
    file_of_names = {
        columns.names: file.name for file, (columns, _) in zip(files, spooled, strict=True) if columns.label
    }
    if len(file_of_names) > 1:
        first, second = list(file_of_names.values())[:2]
        raise InputError(
            f"{first} and {second} name their classes differently: prepare them one after the other"
        )
    named = next(iter(file_of_names), None)
    if named is not None:
        return named
    values = [row.label for _, rows in spooled for row in rows if row.label is not None]
    if not values or any(isinstance(value, str) for value in values):
        return None
    largest = max(int(value) for value in values)
    if largest >= _MAX_CLASSES:
        raise InputError(f"{files[0].name}: a label says class {largest}; at most {_MAX_CLASSES} are taken")
    return tuple(str(number) for number in range(largest + 1)) or None


def _class_name(label: int | str | None, columns: Columns, where: str) -> str | None:
    """The class that a label names; None of negative numbers, by which test splits leave it open."""
    if label is None or (isinstance(label, int) and label < 0):
        return None
    if columns.names is None or isinstance(label, str):
        return plain_text(unicodedata.normalize("NFC", str(label))) or None
    if label >= len(columns.names):
        raise InputError(f"{where}: its label says class {label}; there are {len(columns.names)}")
    return plain_text(columns.names[label])


def _reader(path: Path, row: Row) -> Reader:
    def read() -> bytes:
        if row.damage:
            raise DecodeError(row.damage)
        check_bytes(row.length)
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.pread(descriptor, row.length, row.offset)
        finally:
            os.close(descriptor)

    return read
