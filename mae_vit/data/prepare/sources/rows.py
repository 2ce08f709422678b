"""Reads tables whose rows hold images: Parquet files, and data sets of the Hugging Face Hub as streams of rows.

Columns are chosen by the types of a schema and the Hub's metadata. Streams have no random access, so images are copied
to a temporary file in the output folder, and read from there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import fsspec

from mae_vit.core import user_files
from mae_vit.core.errors import InputError
from mae_vit.core.hub import hub_errors, hub_library, parse_hub_name
from mae_vit.core.messages import closest, error_reason, plain_text
from mae_vit.core.progress import progress
from mae_vit.data.images.bounds import DecodeError
from mae_vit.data.prepare.entries import (
    Entry,
    ImageSource,
    SourceOptions,
    class_text,
    classes_of_cells,
    numbered_classes,
    ordered_classes,
    unique_key,
    without_label_note,
)
from mae_vit.data.prepare.listing import shown
from mae_vit.data.prepare.sources.archives import Spool
from mae_vit.data.shards.dataset_json import FILE_NAME, read_dataset

# Number of rows in memory at a time.
_BATCH_ROWS = 16
# Files of a Hub data set of images in folders or zips; other paths are those of an unknown machine.
_HUB_FILE = re.compile(r"(zip://[^:]*::)?hf://datasets/")
_LONGEST_REASON = 300
_IMAGE_NAMES = ("image", "img", "jpg", "jpeg", "png", "webp", "picture", "photo")
# In order of preference.
_IMAGES = ("images", "binary")
_LABELS = ("number", "text")


class _ParquetTable:
    """A Parquet file as rows: its name in messages, split of rows that name none, and stem of keys without a path."""

    def __init__(self, path: Path, folder: Path, split: str) -> None:
        self.name, self.split, self.stem = path.relative_to(folder).as_posix(), split, path.stem
        try:
            import pyarrow.parquet  # optional
        except ImportError as error:
            missing = error.name or "pyarrow"
            raise InputError(f'{missing} is not installed; pip install "mae-vit[parquet]"') from None
        # Raised by pyarrow for damaged files.
        self._errors = (pyarrow.ArrowException, OSError, ValueError)
        try:
            # Not `pre_buffer`, which reads a whole row group, often the whole file.
            self._file = pyarrow.parquet.ParquetFile(path, pre_buffer=False)
        except self._errors as error:
            reason = f"no whole Parquet file: {error_reason(error)[:_LONGEST_REASON]}"
            raise InputError(f"{self.name} is {user_files.what_file_is(path) or reason}") from None
        self.schema = self._file.schema_arrow

    def rows(self, columns: list[str]) -> Iterator[dict[str, Any]]:
        """Yields each row by column."""
        try:
            for batch in self._file.iter_batches(_BATCH_ROWS, columns=columns, use_threads=False):
                yield from batch.to_pylist()
        except self._errors as error:
            raise InputError(f"{self.name} is damaged: {error_reason(error)[:_LONGEST_REASON]}") from None


class _HubTable:
    """A split of a Hub data set, with the attributes of `_ParquetTable`."""

    def __init__(self, stream: Any, name: str, stem: str, split: str) -> None:
        self.name, self.split, self.stem = name, split, stem
        stream = stream if stream.features else stream._resolve_features()
        self._stream = stream.decode(False)  # images stay bytes
        self.schema = stream.features.arrow_schema

    def rows(self, columns: list[str]) -> Iterator[dict[str, Any]]:
        return iter(self._stream.select_columns(columns))


def holds_image_column(path: Path) -> bool:
    """Whether a Parquet file has images as the Hub stores them, {bytes, path}; False if it cannot be read."""
    with suppress(InputError):
        return any(_kind(field.type) == "images" for field in _ParquetTable(path, path.parent, "").schema)
    return False


def open_parquet(paths: Sequence[Path], folder: Path, name: str, options: SourceOptions) -> ImageSource:
    """Reads Parquet files; splits come from the names of files, and of folders below `folder`.

    Raises:
        InputError: if a file is not Parquet, no column of images fits or several do, or its labels make no sense.
    """
    splits = [user_files.split_from_path(path, folder, options.split) for path in paths]
    _refuse_existing(splits, options)
    tables = (_ParquetTable(path, folder, split) for path, split in zip(paths, splits, strict=True))
    return _read_tables(tables, name, options)


def open_hub_dataset(spec: str, options: SourceOptions) -> ImageSource:
    """Streams hf:USER/NAME[@REVISION] of the Hub, in any format that the `datasets` library reads.

    Raises:
        InputError: if there is no such data set, no access, or no column of images.
        FetchUnavailable: if the Hub cannot be reached, or the connection breaks.
    """
    asked = parse_hub_name(spec, kind="dataset")
    try:
        import datasets as library  # optional
    except ImportError as error:
        missing = error.name or "datasets"
        raise InputError(f'{missing} is not installed; pip install "mae-vit[hub]"') from None
    # The library also logs each error that it raises.
    library.logging.set_verbosity(library.logging.CRITICAL)
    with hub_errors(asked):
        commit = hub_library().HfApi().dataset_info(asked.repo, revision=asked.revision).sha
        name = replace(asked, revision=commit)
        try:
            splits = library.load_dataset(asked.repo, options.config_name, revision=commit, streaming=True)
            alone = list(splits) == ["train"]
            own = {split: options.split if alone else user_files.split_told(split) for split in splits}
            _refuse_existing(list(own.values()), options)
            tables = (_HubTable(splits[split], f"{name} ({split})", split, own[split]) for split in own)
            config = f", {options.config_name}" if options.config_name else ""
            return _read_tables(tables, f"{name}{config}", options)
        except InputError:
            raise
        except (library.exceptions.DatasetsError, ValueError, RuntimeError) as error:
            reason = " ".join(str(error).split())[:_LONGEST_REASON]
            raise InputError(f"{asked}: {reason} (--config-name NAME chooses a configuration)") from None


def _refuse_existing(splits: Sequence[str], options: SourceOptions) -> None:
    """Rejects existing splits before the rows are read; `prepare` could do so only afterwards."""
    if options.overwrite or not (options.out / FILE_NAME).exists():
        return
    if taken := sorted({*splits} & read_dataset(options.out).splits.keys()):
        raise InputError(f'{options.out} already has split "{taken[0]}"; --overwrite replaces it')


def _read_tables(
    tables: Iterable[_ParquetTable | _HubTable], name: str, options: SourceOptions
) -> ImageSource:
    """Reads all rows, and copies their images to a temporary file."""
    spool, entries, without, largest = Spool(options.out), list[Entry](), 0, -1
    keys: dict[str, dict[str, int]] = {}
    unread: dict[str, None] = {}
    table_of_names: dict[tuple[str, ...] | None, str] = {}
    for table in tables:
        columns = _choose_columns(table.schema, table.name, options)
        wanted = [column for column in (columns.image, columns.label, columns.split) if column]
        unread |= dict.fromkeys(columns.unread)
        if columns.label:
            table_of_names.setdefault(columns.names, table.name)
        bar = progress(table.rows(wanted), desc=f"reading {table.name}", unit=" rows", delay=2, leave=False)
        for number, row in enumerate(bar):
            where = f"{table.name}, row {number}"
            data, path = _image(row[columns.image])
            stem = PurePosixPath(path).stem or f"{table.stem}-{number:06d}"
            split_text = columns.split and row[columns.split]
            split = user_files.split_told(split_text) if split_text else table.split
            class_name = None
            if columns.label:
                label = _label(row[columns.label], columns)
                largest = max(largest, label if isinstance(label, int) else -1)
                class_name = _class_name(label, columns.names, where)
                without += class_name is None and isinstance(data, bytes)
            key = unique_key(stem.replace(".", "_"), keys.setdefault(split, {}))
            origin = f"{where} ({plain_text(path)})" if path else where
            kind = user_files.image_kind(data[: user_files.HEAD_BYTES]) if isinstance(data, bytes) else None
            read = spool.write(data) if isinstance(data, bytes) else partial(_fail, data)
            entries.append(Entry(split, class_name, key, origin, kind or "jpg", read))
    if len(table_of_names) > 1:
        first, second, *_ = table_of_names.values()
        raise InputError(f"{first} and {second} call their classes differently; prepare one after the other")
    classes = next(iter(table_of_names), None) or numbered_classes(largest, name) or None
    if classes is None:
        class_of = classes_of_cells({entry.class_name for entry in entries if entry.class_name is not None})
        without += sum(class_of.get(entry.class_name or "", "") is None for entry in entries)
        entries = [replace(entry, class_name=class_of.get(entry.class_name or "")) for entry in entries]
        classes = ordered_classes(entries)
    notes = unread_note(name, unread)
    notes += without_label_note(without, "its cell is empty or negative")
    return ImageSource(name, entries, classes=classes, notes=tuple(notes))


def _image(cell: Any) -> tuple[bytes | str, str]:
    """Returns the bytes of a cell, or the reason if there are none, and its file's name, "" without one."""
    data, path = (cell.get("bytes"), cell.get("path") or "") if isinstance(cell, dict) else (cell, "")
    if data is None and _HUB_FILE.match(path):
        with fsspec.open(path, "rb") as file:
            data = file.read()
    if data is None and path:
        data = "it has a path but no bytes; write paths and labels to a CSV"
    # Without the folder, which is another machine's, or hostile.
    return data if data is not None else "it contains no image", PurePosixPath(path.replace("\\", "/")).name


def _label(value: Any, columns: Columns) -> int | str | None:
    """Returns a cell's label; whole floats become integers, as pandas stores integers with gaps as floats."""
    if isinstance(value, bool):
        return str(value)
    if isinstance(value, float) and value == value:
        if value % 1:
            raise InputError(
                f"column {columns.label} has {value}, which is not a class; choose another with --label-column, or "
                "use --no-labels"
            )
        return int(value)
    return value if isinstance(value, int | str) else None


def _class_name(label: int | str | None, names: Sequence[str] | None, where: str) -> str | None:
    """Returns the class of a label; None for negative numbers, which mark test splits without labels."""
    if label is None or (isinstance(label, int) and label < 0):
        return None
    if names is None or isinstance(label, str):
        return class_text(str(label)) or None
    if label >= len(names):
        raise InputError(f"{where} has class {label}, but there are only {len(names)}; use --no-labels")
    return plain_text(names[label])


def _fail(reason: str) -> bytes:
    raise DecodeError(reason)


class Columns(NamedTuple):
    """The columns of images, labels and splits; class names of integers; others that the user may have meant."""

    image: str
    label: str | None
    split: str | None
    names: tuple[str, ...] | None
    unread: tuple[str, ...]


def _choose_columns(schema: Any, where: str, options: SourceOptions) -> Columns:
    """Chooses the columns of images, labels and splits of a pyarrow schema."""
    kinds = {field.name: _kind(field.type) for field in schema}
    features: dict[str, Any] = {}
    with suppress(KeyError, ValueError, TypeError, AttributeError):
        # The Hub's metadata of each column, such as {"_type": "ClassLabel", "names": [...]}.
        noted = json.loads(schema.metadata[b"huggingface"])["info"]["features"]
        features = {name: feature for name, feature in noted.items() if isinstance(feature, dict)}
    image = _image_column(kinds, features, where, options.image_column)
    if image is None:
        raise InputError(
            f"{where} has no column of images ({{bytes, path}} or binary), only "
            f"{', '.join(kinds) or 'none'}; for paths, write them and the labels to a CSV"
        )
    label = _label_column(schema, kinds, features, where, options.label_column) if options.labels else None
    names = features.get(label, {}).get("names") if label else None
    split = next((name for name, kind in kinds.items() if name.lower() == "split" and kind == "text"), None)
    others = (*_IMAGES, *_LABELS) if options.labels and label is None else _IMAGES
    unread = (name for name, kind in kinds.items() if kind in others and name not in (image, label, split))
    return Columns(image, label, split, tuple(names) if names else None, tuple(unread))


def _kind(arrow_type: Any) -> str:
    """Returns the kind of a column: images, binary, text, number, nested or other."""
    from pyarrow import types  # optional

    if types.is_dictionary(arrow_type):
        return _kind(arrow_type.value_type)
    if types.is_struct(arrow_type):
        index = arrow_type.get_field_index("bytes")
        return "images" if index >= 0 and _kind(arrow_type.field(index).type) == "binary" else "nested"
    if types.is_nested(arrow_type):
        return "nested"
    if types.is_integer(arrow_type) or types.is_floating(arrow_type) or types.is_boolean(arrow_type):
        return "number"
    plain = str(arrow_type).removeprefix("large_").removesuffix("_view")
    return {"binary": "binary", "string": "text"}.get(plain, "other")


def _image_column(
    kinds: Mapping[str, str], features: Mapping[str, Any], where: str, asked: str | None
) -> str | None:
    usable = [name for name, kind in kinds.items() if kind in _IMAGES]
    marked = [name for name in usable if features.get(name, {}).get("_type") == "Image"]
    by_kind = ([name for name in usable if kinds[name] == kind] for kind in _IMAGES)
    candidates = next(filter(None, (marked, *by_kind)), [])
    named = [name for name in candidates if name.lower() in _IMAGE_NAMES]
    return _choose(where, "--image-column", asked, usable, named if len(named) == 1 else candidates)


def _label_column(
    schema: Any, kinds: Mapping[str, str], features: Mapping[str, Any], where: str, asked: str | None
) -> str | None:
    usable = [name for name, kind in kinds.items() if kind in _LABELS]
    for name, kind in kinds.items():
        if asked is None and name.lower() in user_files.LABEL_NAMES and kind in ("nested", "images"):
            raise InputError(
                f"{where}: column {name} has {schema.field(name).type}, not one class for each image; choose "
                "another with --label-column, or use --no-labels"
            )
    marked = [name for name in usable if features.get(name, {}).get("_type") == "ClassLabel"]
    named = [name for name in marked or usable if name.lower() in user_files.LABEL_NAMES]
    # fine_label and coarse_label of CIFAR-100, if no metadata mark the columns of classes.
    last_word = [name for name in usable if re.split(r"[_\W]", name.lower())[-1] in user_files.LABEL_NAMES]
    return _choose(where, "--label-column", asked, usable, named or marked or last_word)


def _choose(
    where: str, option: str, asked: str | None, usable: Collection[str], candidates: Collection[str]
) -> str | None:
    """Returns the column that the user names, or else the only candidate; None without one."""
    if asked is not None and asked not in usable:
        hint = closest(asked, usable) or f"there are {', '.join(usable) or 'none'}"
        raise InputError(f"{option} {asked}: {where} has no such column of a supported type; {hint}")
    if asked is None and len(candidates) > 1:
        hint = f"choose one with `mae-vit prepare SRC OUT {option} NAME`"
        raise InputError(f"{where}: several columns fit ({', '.join(candidates)}); {hint}")
    return asked or next(iter(candidates), None)


def unread_note(where: str, columns: Collection[str]) -> list[str]:
    """Returns a note on columns that are not read."""
    choose = "(--image-column and --label-column choose)"
    return [f"columns of {where} that are not read: {shown(columns)} {choose}"] if columns else []
