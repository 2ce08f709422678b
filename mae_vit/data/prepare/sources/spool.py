"""A temporary file in the output folder, to give random access to compressed tars and columns of images."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import BinaryIO

from mae_vit.data.images.bounds import MAX_IMAGE_BYTES, check_bytes
from mae_vit.data.prepare.entries import Reader


class Spool:
    """A temporary file, created on first use. It has no name, so that not even a kill leaves it behind."""

    def __init__(self, out: Path) -> None:
        """Creates no file yet; `out` is the output folder."""
        self._out = out
        self._file: BinaryIO | None = None

    @property
    def file(self) -> BinaryIO:
        """The file, to append to."""
        if self._file is None:
            self._out.mkdir(parents=True, exist_ok=True)
            self._file = tempfile.TemporaryFile(dir=self._out)  # noqa: SIM115 - readers hold it
        return self._file

    def write(self, data: bytes) -> Reader:
        """Appends an image, and returns its reader; one that is too large is not written, and its reader raises."""
        offset = self.file.seek(0, os.SEEK_END)
        if len(data) <= MAX_IMAGE_BYTES:
            self.file.write(data)
            self.file.flush()
        size, file = len(data), self.file

        def read() -> bytes:
            check_bytes(size)
            return os.pread(file.fileno(), size, offset)

        return read
