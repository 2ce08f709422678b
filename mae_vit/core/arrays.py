"""Arrays in files."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np


def create_array(path: Path, dtype: np.dtype, shape: tuple[int, ...]) -> np.memmap:
    """Creates a .npy file of zeros, reserves its space on the disk, and maps it for writing.

    Without the space, a disk that fills up kills the process (SIGBUS) when it writes to a page. Raises OSError instead.
    """
    array: np.memmap = np.lib.format.open_memmap(path, mode="w+", dtype=dtype, shape=shape)
    if not hasattr(os, "posix_fallocate"):  # macOS
        return array
    try:
        with path.open("rb+") as file:
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
    except OSError:
        del array
        path.unlink()
        raise
    return array


def keep_rows(path: Path, rows: int) -> None:
    """Cuts a .npy file (N, ...) to its first rows, in place."""
    array: np.memmap = np.load(path, mmap_mode="r")
    header = {
        "descr": np.lib.format.dtype_to_descr(array.dtype),
        "fortran_order": False,
        "shape": (rows, *array.shape[1:]),
    }
    size = array.offset + rows * (array.nbytes // len(array))
    with path.open("rb+") as file:
        # NumPy pads headers, so their size does not depend on the number of rows.
        np.lib.format.write_array_header_1_0(file, header)
        assert file.tell() == array.offset
        file.truncate(size)
