"""The rows of a Parquet file: read a few at a time, their images written one behind the other."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mae_vit.core.errors import InputError
from mae_vit.core.messages import error_reason
from mae_vit.core.user_files import HEAD_BYTES, image_kind, what_file_is
from mae_vit.data.images.decode import MAX_IMAGE_BYTES, DecodeError, read_header
from mae_vit.data.prepare.sources.parquet_columns import Columns, parquet_library

# Rows that are in memory at a time.
_BATCH_ROWS = 16


@dataclass(frozen=True)
class Row:
    """A row, whose image lies in the spooled file.

    Attributes:
        label: as the file has it.
        path: of the image, where it tells one.
        extension: of its format.
        offset: in the spooled file, in bytes.
        length: in bytes.
        damage: why there is no image; empty if there is one.
        split: that the row names; empty if it names none.
    """

    label: int | str | None
    path: str
    extension: str = ""
    offset: int = 0
    length: int = 0
    damage: str = ""
    split: str = ""


@contextmanager
def opened_parquet(path: Path, name: str) -> Iterator[Any]:
    """Opens a file.

    Raises:
        InputError: if it is damaged, or none.
    """
    pyarrow, parquet = parquet_library()
    try:
        opened = parquet.ParquetFile(path, pre_buffer=False)
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        why = what_file_is(path) or f"no whole Parquet file: {error_reason(error)[:160]}"
        raise InputError(f"{name} is {why}") from None
    with opened:
        yield opened


def read_rows(opened: Any, columns: Columns) -> Iterator[dict[str, Any]]:
    """Yields path, label, and data or damage of each row; of a damaged row group, the rows that are left too."""
    pyarrow, _ = parquet_library()
    wanted = [name for name in (columns.image, columns.label, columns.split) if name]
    for group in range(opened.num_row_groups):
        left = opened.metadata.row_group(group).num_rows
        batches = opened.iter_batches(_BATCH_ROWS, row_groups=[group], columns=wanted, use_threads=False)
        while left > 0:
            try:
                rows = next(batches).to_pylist()
            except (pyarrow.ArrowException, OSError, ValueError, StopIteration) as error:
                damage = f"row group {group} is damaged: {error_reason(error)[:80]}"
                yield from ({"path": "", "label": None, "damage": damage} for _ in range(left))
                break
            left -= len(rows)
            for row in rows:
                image = row[columns.image]
                data, path = (
                    (image.get("bytes"), image.get("path")) if isinstance(image, dict) else (image, None)
                )
                if isinstance(data, str):
                    data = base64_image(data)
                missing = (
                    "it holds a path and no bytes: write paths and labels as a CSV, and give that"
                    if path
                    else "it holds no image"
                )
                label = row[columns.label] if columns.label else None
                if isinstance(label, bool):
                    label = str(label)
                if isinstance(label, float):  # integers with gaps, as pandas stores them
                    if label % 1 and label == label:
                        raise InputError(
                            f"column {columns.label} holds {label}, which is no class: choose another by "
                            "--label-column, or --no-labels"
                        )
                    label = int(label) if label == label else None
                yield {
                    "path": str(path or ""),
                    "label": label,
                    "split": (columns.split and row[columns.split]) or "",
                    **({"data": data} if data is not None else {"damage": missing}),
                }


def holds_base64(opened: Any, column: str) -> bool:
    """Whether the first text of a column is an image in base64."""
    pyarrow, _ = parquet_library()
    with suppress(pyarrow.ArrowException, OSError, ValueError, StopIteration, IndexError):
        first = next(opened.iter_batches(1, columns=[column], use_threads=False)).to_pylist()[0][column]
        return base64_image(str(first)) is not None
    return False


def base64_image(text: str) -> bytes | None:
    """The image that a text holds as base64, also as `data:image/png;base64,...`; None of other texts."""
    with suppress(ValueError):
        data = base64.b64decode(text.rpartition(",")[2])
        return data if image_kind(data[:HEAD_BYTES]) else None
    return None


def write_row(row: dict[str, Any], spool: Any) -> Row:
    """Appends an image; what is too large to be one is reported, not written."""
    if "damage" in row:
        return Row(row["label"], row["path"], damage=row["damage"], split=row.get("split", ""))
    data, offset = row["data"], spool.tell()
    if len(data) <= MAX_IMAGE_BYTES:
        spool.write(data)
    try:
        extension = read_header(data).extension
    except DecodeError:
        extension = "jpg"  # it will be left out, for the reason that decoding gives
    return Row(row["label"], row["path"], extension, offset, len(data), split=row["split"])
