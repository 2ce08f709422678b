"""A bounded folder of fetched files, shared by all processes of a node.

Files are named by their SHA-256, so one that changes at its source is another file here,
and what two data folders share is fetched once. What was used longest ago makes room.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

from mae_vit.core.errors import FetchUnavailable
from mae_vit.core.messages import error_reason
from mae_vit.core.urls import redact_url
from mae_vit.data.remote.retry import RetryTimer
from mae_vit.data.remote.streams import FetchRefused, open_stream
from mae_vit.runtime.locks import try_lock_descriptor

STALL_S = 30.0
# Below this a connection counts as silent.
_SLOWEST_BYTES_PER_S = 1024
# A server that restarts is back by then; a run that waits longer wastes its GPUs.
PATIENCE_S = 300.0
_WRONG_BYTES_TRIES = 3
_POLL_S = 0.05
_WHOLE = re.compile(r"[0-9a-f]{64}")
# Half-fetched files of processes that were killed: kept for the next try, which continues there.
_PART = re.compile(r"\.([0-9a-f]{64})-(\d+)\.part")
_BLOCK = 1 << 20


@dataclass(frozen=True)
class RemoteFile:
    """A file elsewhere.

    Attributes:
        url: where it is.
        bytes: its size.
        sha256: of its bytes.
    """

    url: str
    bytes: int
    sha256: str


class Cache:
    """Fetched files, at most `limit_bytes` of them together.

    Of one node a file is fetched by one process; the others wait for it.
    """

    def __init__(
        self, folder: Path, limit_bytes: int, *, stall_s: float = STALL_S, patience_s: float = PATIENCE_S
    ) -> None:
        """Opens a folder, which must be there; other files in it are let alone.

        Args:
            folder: of the files.
            limit_bytes: what they may take together, half-fetched ones included.
            stall_s: how long a source may be silent.
            patience_s: how long it is asked again and again while nothing comes.
        """
        self.folder, self.limit_bytes = folder, limit_bytes
        self._stall_s, self._patience_s = stall_s, patience_s

    def path(self, wanted: RemoteFile) -> Path:
        """Where a file lies once it is fetched."""
        return self.folder / wanted.sha256

    def fetch(self, wanted: RemoteFile) -> Path:
        """Makes sure that a file is there: whole, checked.

        Raises:
            FetchRefused: if the source does not have it, or other bytes.
            FetchUnavailable: if it does not come for `patience_s`, or cannot be written.
        """
        path = self.path(wanted)
        patience = RetryTimer(self._patience_s, f"{redact_url(wanted.url)} cannot be fetched")
        try:
            while not path.exists():
                self._fetch(wanted, path, patience)
        except OSError as error:
            reason = error_reason(error)
            raise FetchUnavailable(f"{error.filename or self.folder} cannot be written: {reason}") from None
        return path

    def _fetch(self, wanted: RemoteFile, path: Path, patience: RetryTimer) -> None:
        """Fetches a file, or waits for another process that does."""
        part = self.folder / f".{wanted.sha256}-{wanted.bytes}.part"
        descriptor = os.open(part, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            while not try_lock_descriptor(descriptor):
                patience.report_size(os.fstat(descriptor).st_size)
                patience.check("another process fetches it, without progress")
                time.sleep(_POLL_S)
            # Meanwhile another may have fetched it, or thrown its part away.
            if path.exists() or not _is_at(descriptor, part):
                return
            self._make_room(patience)
            self._receive_all(descriptor, wanted, patience)
            # Who makes room counts files: none may change its name meanwhile.
            with self._room():
                os.replace(part, path)
        finally:
            os.close(descriptor)

    def _room(self) -> FileLock:
        return FileLock(self.folder / ".room.lock")

    def _make_room(self, patience: RetryTimer) -> None:
        """Removes what was used longest ago until all fits, with the part of what is about to come."""
        while True:
            with self._room():
                if self._evict():
                    return
            # All of it is being fetched; what is through may go.
            patience.check(f"the cache {self.folder} of {self.limit_bytes:,} bytes has no room for it")
            time.sleep(_POLL_S)

    def _evict(self) -> bool:
        """Whether all fits into the limit, parts at their full sizes."""
        found = list[tuple[float, int, Path]]()
        for entry in os.scandir(self.folder):
            part = _PART.fullmatch(entry.name)
            if part or _WHOLE.fullmatch(entry.name):
                with suppress(FileNotFoundError):
                    status = entry.stat()
                    found.append(
                        (status.st_mtime, int(part[2]) if part else status.st_size, Path(entry.path))
                    )
        taken = sum(size for _, size, _ in found)
        for _, size, path in sorted(found):
            if taken <= self.limit_bytes:
                break
            if _drop(path):
                taken -= size
        return taken <= self.limit_bytes

    def _receive_all(self, descriptor: int, wanted: RemoteFile, patience: RetryTimer) -> None:
        """Fetches what a part lacks, and compares the whole."""
        wrong = 0
        while True:
            try:
                self._receive(descriptor, wanted, patience)
            except _WriteError as error:
                raise error.reason from None
            except OSError as error:
                # A trickle is no progress, however long it lasts.
                if not isinstance(error, _TooSlow):
                    patience.report_size(os.fstat(descriptor).st_size)
                patience.wait(error_reason(error))
                continue
            if _digest(descriptor) == wanted.sha256:
                os.fsync(descriptor)
                return
            # Some of it is wrong, nobody knows which.
            os.ftruncate(descriptor, 0)
            wrong += 1
            if wrong >= _WRONG_BYTES_TRIES:
                raise FetchRefused(f"{wrong} times other bytes than described")

    def _receive(self, descriptor: int, wanted: RemoteFile, patience: RetryTimer) -> None:
        """Appends the bytes that are lacking.

        Raises:
            OSError: if they do not come.
        """
        have = os.fstat(descriptor).st_size
        if have >= wanted.bytes:
            return
        with open_stream(wanted.url, have, stall_s=self._stall_s) as stream:
            if stream.first != have:
                os.ftruncate(descriptor, 0)
                have = 0
            window_end, in_window = time.monotonic() + self._stall_s, 0
            while have < wanted.bytes:
                data = stream.read()[: wanted.bytes - have]
                if not data:
                    raise OSError(f"it ends after {have:,} of {wanted.bytes:,} bytes")
                _append(descriptor, data)
                have, in_window = have + len(data), in_window + len(data)
                if time.monotonic() > window_end:
                    if in_window < _SLOWEST_BYTES_PER_S * self._stall_s:
                        raise _TooSlow(f"{in_window:,} bytes in {self._stall_s:g} s")
                    window_end, in_window = time.monotonic() + self._stall_s, 0
                    patience.progress()
        patience.progress()


class _TooSlow(TimeoutError):
    """The source sends less than `_SLOWEST_BYTES_PER_S`."""


class _WriteError(Exception):
    """The disk does not take it: asking the source again does not help."""

    def __init__(self, reason: OSError) -> None:
        super().__init__(reason)
        self.reason = reason


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _drop(path: Path) -> bool:
    """Removes a file, unless it is being fetched; readers that have it open keep it."""
    with suppress(FileNotFoundError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            if not try_lock_descriptor(descriptor):
                return False
            path.unlink(missing_ok=True)
        finally:
            os.close(descriptor)
    return True


def _append(descriptor: int, data: bytes) -> None:
    rest = memoryview(data)
    try:
        while rest:
            rest = rest[os.write(descriptor, rest) :]
    except OSError as error:
        raise _WriteError(error) from None


def _digest(descriptor: int) -> str:
    digest, at = hashlib.sha256(), 0
    while block := os.pread(descriptor, _BLOCK, at):
        digest.update(block)
        at += len(block)
    return digest.hexdigest()
