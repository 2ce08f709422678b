"""Reads bytes of a split's shard files."""

from __future__ import annotations

import errno
import os
import sys
import time
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mae_vit.core.messages import error_reason
from mae_vit.data.shards.dataset_json import Shard

_MAX_OPEN_SHARDS = 256
# Network file systems may fail briefly; each retry opens the shard anew.
_WAITS_S = (0.0, 0.1, 0.5, 1.0)
# Do not wait again for a lost shard with each of its samples, nor for every shard if all are gone: that would take
# hours. It may come back.
_LOST_FOR_S = 60.0
_PATIENT_FOR = 8
# Errors of this process or machine, not of the shard.
_OUR_OWN = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
_MAX_STATTED_SHARDS = 64


class ReadError(ValueError):
    """Bytes cannot be read; the message gives the reason in short."""


class _Lost(NamedTuple):
    """The missing part of a shard: its bytes from `end` on, as of the time `since` (s)."""

    end: int
    reason: str
    since: float


class ShardFiles:
    """The shards of a split, opened when they are read. A pickled copy opens its own files.

    Attributes:
        names: file name of each shard.
    """

    def __init__(self, folder: Path, shards: Sequence[Shard]) -> None:
        """Opens nothing yet."""
        self._folder, self.names = folder, [shard.file for shard in shards]
        self._sizes = np.array([shard.bytes for shard in shards], np.int64)
        self._open: OrderedDict[int, int] = OrderedDict()
        self._lost: dict[int, _Lost] = {}

    def path(self, shard: int) -> Path:
        """Returns the path of a shard."""
        return self._folder / self.names[shard]

    def read(self, shard: int, offset: int, length: int) -> bytes:
        """Reads bytes of a shard; raises ReadError if a few tries do not give them."""
        descriptor = self._open.get(shard)
        if descriptor is not None:
            # The fast path: nearly every read ends here, in a microsecond or two.
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
        lost = self._lost.get(shard)
        if lost and offset + length <= lost.end:
            lost = None
        if lost and time.monotonic() - lost.since < _LOST_FOR_S:
            raise ReadError(lost.reason)
        waits = _WAITS_S if lost is None and len(self._lost) < _PATIENT_FOR else (0.0,)
        reason, end = "", 0
        for wait in waits:
            if wait:
                time.sleep(wait)
            try:
                descriptor = self._descriptor(shard)
                data = read_range(descriptor, offset, length)
                end = os.fstat(descriptor).st_size
            except ReadError as error:
                reason, end = str(error), 0
                continue
            except OSError as error:
                if error.errno in _OUR_OWN:
                    raise
                reason, end = f"cannot be read: {error_reason(error)}", sys.maxsize
            else:
                if len(data) == length:
                    if lost:
                        del self._lost[shard]
                    return data
                reason = f"truncated: only {len(data):,} of {length:,} bytes"
                if end < offset + length:
                    reason = f"the shard is truncated: only {end:,} of {self._sizes[shard]:,} bytes"
            self._close(shard)
        if end < offset + length:
            self._lost[shard] = _Lost(end, reason, time.monotonic())
        raise ReadError(reason)

    def _descriptor(self, shard: int) -> int:
        """Opens a shard, unless it is open; raises ReadError if it is gone, or larger than described."""
        if shard in self._open:
            self._open.move_to_end(shard)
            return self._open[shard]
        while len(self._open) >= _MAX_OPEN_SHARDS:
            self._close(next(iter(self._open)))
        try:
            descriptor = os.open(self.path(shard), os.O_RDONLY)
        except OSError as error:
            if error.errno in _OUR_OWN:
                raise
            raise ReadError(f"the shard is gone: {error_reason(error)}") from None
        size, described = os.fstat(descriptor).st_size, self._sizes[shard]
        if size > described:
            os.close(descriptor)
            # Its samples may lie elsewhere now. A truncated shard still holds its first samples.
            raise ReadError(f"the shard changed: {size:,} bytes instead of {described:,}")
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
    """Reads until all is there or the file ends: a network file system may return less at once."""
    parts = []
    while length and (part := os.pread(descriptor, length, offset)):
        parts.append(part)
        offset, length = offset + len(part), length - len(part)
    return b"".join(parts)


def misfit_shards(folder: Path, shards: Sequence[Shard]) -> dict[int, int | None]:
    """Finds shards that do not have the described size: their size by shard number, None for a missing shard.

    Checks 64 evenly spread shards, and all if one of these does not fit; `mae-vit check` reads them all.
    """

    def size_of(number: int) -> int | None:
        try:
            return (folder / shards[number].file).stat().st_size
        except OSError:
            return None

    # They include the first and the last: an interrupted copy lacks its end.
    numbers = np.linspace(0, len(shards) - 1, min(len(shards), _MAX_STATTED_SHARDS)).astype(int).tolist()
    if all(size_of(number) == shards[number].bytes for number in numbers):
        return {}
    sizes = {number: size_of(number) for number in range(len(shards))}
    return {number: size for number, size in sizes.items() if size != shards[number].bytes}
