"""Arrays in files."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np


def create_array(path: Path, dtype: np.dtype, shape: tuple[int, ...]) -> np.memmap:
    """Creates a .npy file of zeros, with all its space on the disk, and maps it to be written.

    Without the space, a disk that fills up kills the process (SIGBUS) when it writes to a page.

    Raises:
        OSError: if the disk has no room for it; the file is gone then.
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
