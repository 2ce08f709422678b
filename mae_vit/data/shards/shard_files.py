"""The shard files of a split, and bytes of them."""

from __future__ import annotations

import errno
import os
import time
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from mae_vit.core.messages import error_reason

_MAX_OPEN_SHARDS = 256
# Network file systems fail for a moment; each try opens the shard anew.
_WAITS_S = (0.0, 0.1, 0.5, 1.0)
# A lost shard is not waited for again with each of its samples, nor every shard where all are
# gone: that would take hours. It may come back.
_LOST_FOR_S = 60.0
_PATIENT_FOR = 8
# Not the shard's fault.
_OUR_OWN = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


class ReadError(ValueError):
    """Bytes that cannot be had; the message says why, in short."""


class ShardFiles:
    """The shards of a split, opened when they are read.

    Pickled, it opens for itself.
    """

    def __init__(self, folder: Path, shards: ShardTable) -> None:
        """Opens nothing yet.

        Args:
            folder: of the shards.
            shards: their names, and the size that each must have.
        """
        self._folder, self._shards = folder, shards
        self._open: OrderedDict[int, int] = OrderedDict()
        self._lost: dict[int, tuple[str, float]] = {}  # why, and when it was last tried

    def path(self, shard: int) -> Path:
        """Where a shard lies."""
        return self._folder / self._shards.name(shard)

    def read(self, shard: int, offset: int, length: int) -> bytes:
        """Reads bytes of a shard.

        Raises:
            ReadError: if a few tries do not give them.
        """
        descriptor = self._open.get(shard)
        if descriptor is not None:
            # Nearly every read ends here, in a microsecond or two; any other takes its time.
            try:
                data = os.pread(descriptor, length, offset)
            except OSError:
                data = b""
            if len(data) == length:
                self._open.move_to_end(shard)
                return data
        return self._read_patiently(shard, offset, length)

    def _read_patiently(self, shard: int, offset: int, length: int) -> bytes:
        """Reads bytes of a shard that is not open, or has just failed."""
        reason, since = self._lost.get(shard, ("", 0.0))
        if reason and time.monotonic() - since < _LOST_FOR_S:
            raise ReadError(reason)
        waits = _WAITS_S if not reason and len(self._lost) < _PATIENT_FOR else (0.0,)
        for wait in waits:
            if wait:
                time.sleep(wait)
            try:
                descriptor = self._descriptor(shard)
            except ReadError as error:
                reason, lost = str(error), True
                continue
            self._lost.pop(shard, None)
            try:
                data = read_range(descriptor, offset, length)
            except OSError as error:
                reason, lost = f"cannot be read: {error_reason(error)}", False
            else:
                if len(data) == length:
                    return data
                reason, lost = f"truncated: {len(data):,} of {length:,} bytes are there", False
            self._close(shard)
        if lost:
            self._lost[shard] = (reason, time.monotonic())
        raise ReadError(reason)

    def _descriptor(self, shard: int) -> int:
        """Opens a shard, unless it is open.

        Raises:
            ReadError: if it is gone, or has another size than it had.
        """
        if shard in self._open:
            self._open.move_to_end(shard)
            return self._open[shard]
        while len(self._open) >= _MAX_OPEN_SHARDS:
            self._close(next(iter(self._open)))
        size = self._shards.size(shard)
        try:
            descriptor = os.open(self.path(shard), os.O_RDONLY)
        except OSError as error:
            if error.errno in _OUR_OWN:
                raise
            raise ReadError(f"the shard is gone: {error_reason(error)}") from None
        found = os.fstat(descriptor).st_size
        if found != size:
            os.close(descriptor)
            # What lies where in it nobody knows. A file of the same size is taken for the
            # same: where it is not, most of its samples do not decode.
            raise ReadError(f"the shard changed: {found:,} bytes instead of {size:,}")
        self._open[shard] = descriptor
        return descriptor

    def _close(self, shard: int) -> None:
        with suppress(OSError):
            os.close(self._open.pop(shard))

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_open": OrderedDict(), "_lost": {}}

    def __del__(self) -> None:
        for shard in list(getattr(self, "_open", {})):
            self._close(shard)


def read_range(descriptor: int, offset: int, length: int) -> bytes:
    """Reads until all is there or the file ends: a network file system may give less at once."""
    parts = []
    while length and (part := os.pread(descriptor, length, offset)):
        parts.append(part)
        offset, length = offset + len(part), length - len(part)
    return b"".join(parts)


class ShardTable:
    """Names and sizes of a split's shards, by number: about 30 bytes for each."""

    def __init__(self, names: Sequence[str], sizes: Sequence[int]) -> None:
        """Takes file names, and sizes in bytes."""
        # Names of files need not be Unicode; none ends with the zeros that arrays are filled up with.
        self._names = np.array([name.encode("utf-8", "surrogateescape") for name in names])
        self._sizes = np.array(sizes, np.int64)

    def __len__(self) -> int:
        return len(self._sizes)

    def name(self, shard: int) -> str:
        """The file name of a shard."""
        return bytes(self._names[shard]).decode("utf-8", "surrogateescape")

    def size(self, shard: int) -> int:
        """The size of a shard in bytes."""
        return int(self._sizes[shard])
