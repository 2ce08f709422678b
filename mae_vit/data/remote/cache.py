"""A bounded cache of fetched files, shared by all processes of a node, and remote shards that are read through it.

Files are named by their SHA-256: a file that changes at its source becomes a new file here, and a file that two data
folders share is fetched once. The least recently used files are evicted first.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple

from filelock import FileLock

from mae_vit.core.errors import FetchUnavailable
from mae_vit.core.messages import error_reason
from mae_vit.core.urls import file_url
from mae_vit.data.remote.download import PATIENCE_S, FetchRefused, download
from mae_vit.data.shards.dataset_json import Shard
from mae_vit.data.shards.shard_files import ReadError, read_range
from mae_vit.runtime.locks import try_lock_descriptor

_WRONG_BYTES_TRIES = 3
_POLL_S = 0.05
_WHOLE = re.compile(r"[0-9a-f]{64}")
# Files that are being fetched, or that a killed process left behind.
_PART = re.compile(r"\.([0-9a-f]{64})-(\d+)\.part")
# How often a shard is marked as used; the least recently marked shards are evicted first.
_MARKED_EVERY_S = 5.0
_TRIES = 5


class RemoteFile(NamedTuple):
    """A remote file, with its size and the checksum of its bytes."""

    url: str
    bytes: int
    sha256: str


class RemoteFolder(NamedTuple):
    """A remote data folder: its URL, the local folder for its shards, and their largest total size there."""

    url: str
    cache_folder: Path
    cache_bytes: int


class Cache:
    """Fetched files of at most `limit_bytes` in total. One process of a node fetches a file; the others wait for it."""

    def __init__(self, folder: Path, limit_bytes: int, *, patience_s: float = PATIENCE_S) -> None:
        """Opens an existing folder for at most `limit_bytes`; a partly fetched file counts in full.

        `patience_s` is the total wait between tries, and the longest wait for room. Files that it did not write stay.
        """
        self.folder, self.limit_bytes = folder, limit_bytes
        self._patience_s = patience_s

    def fetch(self, file: RemoteFile) -> Path:
        """Fetches a file and verifies it, unless the cache has it.

        Raises:
            FetchRefused: if the source does not have it, or has other bytes.
            FetchUnavailable: if it cannot be fetched now, or cannot be written.
        """
        path = self.folder / file.sha256
        try:
            while not path.exists():
                self._fetch(file, path)
        except OSError as error:
            reason = error_reason(error)
            raise FetchUnavailable(f"{error.filename or self.folder} cannot be written: {reason}") from None
        return path

    def _fetch(self, file: RemoteFile, path: Path) -> None:
        """Fetches a file, or waits for another process that does."""
        part = self.folder / f".{file.sha256}-{file.bytes}.part"
        with part.open("ab") as stream:
            while not try_lock_descriptor(stream.fileno()):
                time.sleep(_POLL_S)
            # Meanwhile another process may have fetched the file or removed the part.
            if path.exists() or not _is_at(stream.fileno(), part):
                return
            try:
                self._make_room()
                self._receive(stream, file)
                # Eviction counts files: none may be renamed meanwhile.
                with self._room():
                    os.replace(part, path)
            except BaseException:
                part.unlink(missing_ok=True)
                raise

    def _room(self) -> FileLock:
        return FileLock(self.folder / ".room.lock")

    def _make_room(self) -> None:
        """Evicts the least recently used files until all fit, including the file about to be fetched."""
        until = time.monotonic() + self._patience_s
        while True:
            with self._room():
                if self._evict():
                    return
            # All files are being fetched; a complete one can be evicted.
            if time.monotonic() > until:
                raise FetchUnavailable(
                    f"the cache {self.folder} of {self.limit_bytes:,} bytes has no room for another file"
                )
            time.sleep(_POLL_S)

    def _evict(self) -> bool:
        """Evicts files until all fit, parts counted in full; returns whether they do."""
        files = list[tuple[float, int, Path]]()
        for entry in os.scandir(self.folder):
            part = _PART.fullmatch(entry.name)
            if part or _WHOLE.fullmatch(entry.name):
                with suppress(FileNotFoundError):
                    status = entry.stat()
                    size = int(part[2]) if part else status.st_size
                    files.append((status.st_mtime, size, Path(entry.path)))
        taken = sum(size for _, size, _ in files)
        for _, size, path in sorted(files):
            if taken <= self.limit_bytes:
                break
            if _drop(path):
                taken -= size
        return taken <= self.limit_bytes

    def _receive(self, stream: BinaryIO, file: RemoteFile) -> None:
        for _ in range(_WRONG_BYTES_TRIES):
            if download(file.url, stream, size=file.bytes, patience_s=self._patience_s) == file.sha256:
                os.fsync(stream.fileno())
                return
        raise FetchRefused(f"received other bytes than described, {_WRONG_BYTES_TRIES} times")


def _is_at(descriptor: int, path: Path) -> bool:
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(descriptor), path.stat())
    return False


def _drop(path: Path) -> bool:
    """Removes a file, unless it is being fetched; readers that have it open keep it."""
    with suppress(FileNotFoundError), path.open("rb+") as file:
        if not try_lock_descriptor(file.fileno()):
            return False
        path.unlink(missing_ok=True)
    return True


class RemoteShards:
    """The shards of a remote split, by number.

    Each read opens the file anew: an open file would keep its disk space after its eviction.

    Attributes:
        names: file name of each shard.
    """

    def __init__(self, remote: RemoteFolder, shards: Sequence[Shard]) -> None:
        """Fetches nothing yet."""
        self._cache = Cache(remote.cache_folder, remote.cache_bytes)
        self.names = [shard.file for shard in shards]
        self._files = [RemoteFile(file_url(remote.url, s.file), s.bytes, s.sha256) for s in shards]
        self._refused: dict[int, str] = {}
        self._marked: dict[int, float] = {}

    def path(self, shard: int) -> Path:
        """Fetches a shard, unless the cache has it; it stays there until it is evicted.

        Raises:
            ReadError: if its source does not have it.
            FetchUnavailable: if it cannot be fetched now.
        """
        # Ask once for a refused shard, not again for each of its samples.
        if shard in self._refused:
            raise ReadError(self._refused[shard])
        try:
            path = self._cache.fetch(self._files[shard])
        except FetchRefused as error:
            self._refused[shard] = f"the shard cannot be fetched: {error}"
            raise ReadError(self._refused[shard]) from None
        now = time.monotonic()
        if now - self._marked.get(shard, -_MARKED_EVERY_S) >= _MARKED_EVERY_S:
            self._marked[shard] = now
            with suppress(OSError):  # gone, or another user's
                os.utime(path)
        return path

    def read(self, shard: int, offset: int, length: int) -> bytes:
        """Reads bytes of a shard.

        Raises:
            ReadError: if its source does not have it.
            FetchUnavailable: if it cannot be fetched now.
        """
        why = "is evicted from the cache at once; raise data.cache_gib"
        for _ in range(_TRIES):
            path = self.path(shard)
            try:
                descriptor = os.open(path, os.O_RDONLY)
            except FileNotFoundError:
                continue  # it has just been evicted
            try:
                whole = os.fstat(descriptor).st_size == self._files[shard].bytes
                data = read_range(descriptor, offset, length) if whole else b""
            finally:
                os.close(descriptor)
            if len(data) == length:
                return data
            # It was whole when it was fetched: something has truncated it since.
            path.unlink(missing_ok=True)
            why = f"is truncated in the cache each time, {path}; another program or the disk changes files there"
        raise ReadError(f"the shard {why}")
