"""Features as NumPy's .npz, written in a stream: an array need not fit into memory."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from mae_vit.weights.embed.table import Table


def write_npz(table: Table, path: Path) -> None:
    """Writes features (N, D), keys (N,), and labels (N,), classes, splits (N,) where there are any.

    `metadata` is JSON. No array needs pickle. Equal tables give equal bytes.
    """
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        _add(archive, "features", table.dtype, (table.rows, table.width), table.feature_chunks())
        # As wide as the longest, which is known once all were looked at.
        width = np.result_type(*{chunk.dtype for chunk in table.key_chunks()})
        _add(archive, "keys", width, (table.rows,), table.key_chunks())
        if table.has_labels:
            classes = np.array(table.classes, np.str_)
            _add(archive, "labels", np.dtype(np.int32), (table.rows,), table.label_chunks())
            _add(archive, "classes", classes.dtype, classes.shape, [classes])
        if table.splits:
            names = np.array(table.splits, np.str_)
            _add(archive, "splits", names.dtype, (table.rows,), table.split_chunks())
        metadata = np.array(json.dumps(table.facts))
        _add(archive, "metadata", metadata.dtype, (), [metadata])


def read_npz_facts(path: Path) -> dict[str, Any]:
    """Reads what `write_npz` says of the features.

    Raises:
        OSError, ValueError, KeyError, zipfile.BadZipFile: if that is no such file.
    """
    with np.load(path, allow_pickle=False) as file:
        return dict(json.loads(str(file["metadata"])))


def _add(
    archive: zipfile.ZipFile,
    name: str,
    dtype: np.dtype[Any],
    shape: tuple[int, ...],
    chunks: Iterable[np.ndarray],
) -> None:
    # A member of no date: zipfile gives those that are opened by name 1980.
    with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
        described = {
            "descr": np.lib.format.dtype_to_descr(dtype),
            "fortran_order": False,
            "shape": shape,
        }
        np.lib.format.write_array_header_1_0(member, described)
        for chunk in chunks:
            member.write(np.ascontiguousarray(chunk, dtype).tobytes())
