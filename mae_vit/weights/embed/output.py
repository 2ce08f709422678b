"""Features in a file that others read: NumPy's .npz or Apache Parquet."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from mae_vit.core.errors import InputError
from mae_vit.weights.embed.images import Images

_METADATA = b"mae_vit"
_ROW_GROUP_BYTES = 32 << 20


def columns_of(
    features: np.ndarray, whole: np.ndarray, images: Images, facts: dict[str, Any]
) -> dict[str, np.ndarray]:
    """The columns of an output, by name.

    Args:
        features: (n, D), in the order of `whole`.
        whole: int64 (n,), numbers of the images that have features.
        images: their source.
        facts: what the features are of (`mae_vit.weights.embed.identity`).

    Returns:
        features, keys (n,), and where there are any: labels int32 (n,), -1 for none, with the names of
        `classes`, and splits (n,). `metadata` is JSON.
    """
    columns = {"features": features, "keys": np.array(images.keys(whole), np.str_)}
    classes: tuple[str, ...] = ()
    if (images.labels >= 0).any():
        classes = images.classes
        columns["labels"] = np.maximum(images.labels, -1)[whole].astype(np.int32)
        columns["classes"] = np.array(classes, np.str_)
    if images.splits:
        columns["splits"] = np.array(images.splits, np.str_)[images.split_numbers(whole)]
    counts = {"rows": len(whole), "broken": len(images) - len(whole), "classes": list(classes)}
    return {**columns, "metadata": np.array(json.dumps({**facts, **counts}))}


def write_output(path: Path, columns: dict[str, np.ndarray]) -> None:
    """Writes `columns_of` as the name's suffix says; equal columns give equal bytes. No array needs pickle."""
    if path.suffix == ".npz":
        # An array that is mapped from disk is written in pieces.
        np.savez(path, **columns)  # type: ignore[arg-type]
    else:
        _write_parquet(path, columns)


def _write_parquet(path: Path, columns: dict[str, np.ndarray]) -> None:
    """The columns features (a list of D), keys, labels and splits; the schema's metadata has JSON under "mae_vit"."""
    import pyarrow as pa  # optional
    import pyarrow.parquet as pq

    features = columns["features"]
    rows, width = features.shape
    types = {"features": pa.list_(pa.from_numpy_dtype(features.dtype), width)}
    known = {"keys": pa.string(), "labels": pa.int32(), "splits": pa.string()}
    types |= {name: known[name] for name in known if name in columns}
    metadata = {_METADATA: str(columns["metadata"]).encode()}
    schema = pa.schema(list(types.items()), metadata=metadata)
    size = max(1, _ROW_GROUP_BYTES // (width * features.dtype.itemsize))
    # A dictionary of floats would be as large as they are.
    with pq.ParquetWriter(path, schema, use_dictionary=["splits"]) as writer:
        for at in range(0, rows, size):
            part = {name: columns[name][at : at + size] for name in types}
            flat = pa.array(np.ascontiguousarray(part.pop("features")).reshape(-1))
            arrays = [pa.FixedSizeListArray.from_arrays(flat, width)]
            arrays += [pa.array(values.tolist(), types[name]) for name, values in part.items()]
            writer.write_table(pa.Table.from_arrays(arrays, schema=schema), row_group_size=size)


def read_facts(path: Path) -> dict[str, Any]:
    """Reads the metadata of an output.

    Raises:
        OSError, ValueError, KeyError, TypeError, zipfile.BadZipFile: if it is none.
    """
    if path.suffix == ".npz":
        with np.load(path, allow_pickle=False) as file:
            return dict(json.loads(str(file["metadata"])))
    import pyarrow.parquet as pq  # optional

    return dict(json.loads(pq.read_schema(path).metadata[_METADATA]))


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
