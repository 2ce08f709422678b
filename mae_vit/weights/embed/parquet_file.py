"""Features as Apache Parquet, a row group at a time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mae_vit.core.errors import InputError
from mae_vit.weights.embed.table import Table

_METADATA = b"mae_vit"


def require_parquet() -> None:
    """Makes sure that Parquet can be written.

    Raises:
        InputError: with the command that installs it.
    """
    try:
        import pyarrow.parquet  # noqa: F401 - optional
    except ImportError:
        raise InputError(
            'Parquet needs pyarrow: pip install "mae-vit[parquet]", or give --out FILE.npz'
        ) from None


def write_parquet(table: Table, path: Path) -> None:
    """Writes the columns features (a list of D), keys, and labels and splits where there are any.

    The schema's metadata have JSON under "mae_vit". Equal tables give equal bytes.
    """
    import pyarrow as pa  # optional
    import pyarrow.parquet as pq

    element = pa.from_numpy_dtype(table.dtype)
    columns = {"features": pa.list_(element, table.width), "keys": pa.string()}
    iterators: dict[str, Any] = {"features": table.feature_chunks(), "keys": table.key_chunks()}
    if table.has_labels:
        columns["labels"], iterators["labels"] = pa.int32(), table.label_chunks()
    if table.splits:
        columns["splits"], iterators["splits"] = pa.string(), table.split_chunks()
    schema = pa.schema(list(columns.items()), metadata={_METADATA: json.dumps(table.facts).encode()})
    # Of floats a dictionary would be as large as they are.
    with pq.ParquetWriter(path, schema, use_dictionary=["splits"]) as writer:
        for chunks in zip(*iterators.values(), strict=True):
            arrays = [
                pa.FixedSizeListArray.from_arrays(pa.array(chunk.reshape(-1)), table.width)
                if name == "features"
                else pa.array(chunk.tolist(), columns[name])
                for name, chunk in zip(columns, chunks, strict=True)
            ]
            writer.write_table(pa.Table.from_arrays(arrays, schema=schema), row_group_size=table.chunk_rows)


def read_parquet_facts(path: Path) -> dict[str, Any]:
    """Reads what `write_parquet` says of the features.

    Raises:
        OSError, ValueError, KeyError: if that is no such file.
    """
    import pyarrow.parquet as pq  # optional

    return dict(json.loads(pq.read_schema(path).metadata[_METADATA]))
