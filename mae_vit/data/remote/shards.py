"""Reads byte ranges of remote shards, which are fetched when they are read."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from mae_vit.core.urls import file_url
from mae_vit.data.remote.cache import Cache, RemoteFile
from mae_vit.data.remote.download import FetchRefused
from mae_vit.data.remote.folder import RemoteFolder
from mae_vit.data.shards.dataset_json import Shard
from mae_vit.data.shards.shard_files import ReadError, ShardTable, read_range

# How often a shard is marked as used; the least recently marked shards are evicted first.
_MARKED_EVERY_S = 5.0
_TRIES = 5


class RemoteShards:
    """The shards of a remote split, by number.

    Each read opens the file anew: an open file would keep its disk space after its eviction.
    """

    def __init__(self, remote: RemoteFolder, shards: Sequence[Shard]) -> None:
        """Fetches nothing yet."""
        self._cache, self._url = Cache(remote.cache_folder, remote.cache_bytes), remote.url
        self._shards = ShardTable(shards)
        digests = b"".join(bytes.fromhex(shard.sha256) for shard in shards)
        self._sha256 = np.frombuffer(digests, np.uint8).reshape(len(shards), -1)
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
        url = file_url(self._url, self._shards.name(shard))
        digest = self._sha256[shard].tobytes().hex()
        try:
            path = self._cache.fetch(RemoteFile(url, self._shards.size(shard), digest))
        except FetchRefused as error:
            self._refused[shard] = f"the shard cannot be had: {error}"
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
        for _ in range(_TRIES):
            path = self.path(shard)
            try:
                descriptor = os.open(path, os.O_RDONLY)
            except FileNotFoundError:
                continue  # it has just been evicted
            try:
                whole = os.fstat(descriptor).st_size == self._shards.size(shard)
                data = read_range(descriptor, offset, length) if whole else b""
            finally:
                os.close(descriptor)
            if len(data) == length:
                return data
            # It was whole when it was fetched: something has truncated it since.
            path.unlink(missing_ok=True)
        raise ReadError("the shard does not last in the cache")
