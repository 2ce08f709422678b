"""Yields a rank's batches, and downloads the remote shards that coming batches need."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import suppress

import numpy as np

from mae_vit.core.batch import Batch
from mae_vit.core.errors import FetchUnavailable, InputError
from mae_vit.core.progress import progress
from mae_vit.core.urls import redact_url
from mae_vit.data.batches.augmented import AugmentedSource
from mae_vit.data.index import ShardIndex, TarIndex
from mae_vit.data.order.order import Order
from mae_vit.data.remote.folder import gib
from mae_vit.data.shards.shard_files import ReadError


def check_cache(
    index: ShardIndex, source: AugmentedSource, order: Order, *, world_size: int, node_ranks: int
) -> None:
    """Checks that shards that are read at the same time fit into the cache and its disk together.

    In a smaller cache they would evict each other and be downloaded many times.

    Raises:
        InputError: if the cache is too small; names the size needed.
    """
    remote, shards = index.remote, index.split_info.shards
    if remote is None or not source.reads_shards:
        return
    needed, why = sum(shard.bytes for shard in shards), 'data.order="global"'
    if blocks := order.blocks:
        # Three blocks per lane: a lane may cross from one block into the next, and a third is prefetched.
        lanes = max(1, -(-blocks.lanes * node_ranks // world_size))
        largest = max(shard.bytes for shard in shards)
        needed, why = min(needed, 3 * lanes * blocks.block_shards * largest), 'data.order="blocks"'
    needs = f"{why} needs {gib(needed)} GiB of shards of {redact_url(remote.url)} at once, but the"
    if needed > remote.cache_bytes:
        raise InputError(
            f"{needs} cache has only {gib(remote.cache_bytes)}; raise data.cache_gib, or use data.order=blocks "
            "with fewer data.lanes or data.block_shards"
        )
    room = shutil.disk_usage(remote.cache_folder).free
    for entry in os.scandir(remote.cache_folder):
        with suppress(FileNotFoundError):
            room += entry.stat().st_size
    if needed > room:
        raise InputError(
            f"{needs} disk of {remote.cache_folder} has only {gib(room)} free; give data.cache_dir on another"
        )


def fetch_split(index: ShardIndex, source: AugmentedSource, order: Order, *, say: bool) -> None:
    """Downloads every shard of the split if each step reads from all of them; `say` shows a progress bar.

    Call it before the first collective, while no rank waits for another.

    Raises:
        FetchUnavailable: if the remote source does not answer.
    """
    if not isinstance(index, TarIndex) or index.remote is None or not source.reads_shards or order.blocks:
        return
    shards = index.split_info.shards
    total = sum(shard.bytes for shard in shards)
    with progress(
        total=total, desc="fetching shards", unit="B", unit_scale=True, delay=2, disable=not say
    ) as bar:
        for number, shard in enumerate(shards):
            with suppress(ReadError):  # reported when a sample of it is read
                index.fetch(number)
            bar.update(shard.bytes)


def fetch_ahead(
    batches: Iterator[Batch], index: ShardIndex, coming: Iterator[np.ndarray], *, node_ranks: int
) -> Iterator[Batch]:
    """Yields batches while a thread fetches the remote shards of later batches.

    `coming` has the sample numbers int64 (B,) of each batch; `node_ranks` ranks share this node's cache.
    """
    assert isinstance(index, TarIndex)
    assert index.remote is not None
    # The prefetcher gets a third of the cache. Shards being read need the rest: one or two blocks of each lane.
    prefetcher = _Prefetcher(index, coming, index.remote.cache_bytes // (3 * node_ranks))
    try:
        for number, batch in enumerate(batches):
            prefetcher.advance_to(number)
            yield batch
    finally:
        prefetcher.advance_to(None)


class _Prefetcher:
    """A thread that walks through the samples of coming batches and downloads their shards.

    It stays at most `window_bytes` ahead: the cache would evict earlier downloads before they are read. It ignores a
    failed download: the reader of the shard tries again and reports the error.
    """

    def __init__(self, index: TarIndex, batches: Iterator[np.ndarray], window_bytes: int) -> None:
        self._index, self._batches, self._window = index, batches, window_bytes
        self._sizes = [shard.bytes for shard in index.split_info.shards]
        self._reached: int | None = 0
        self._moved = threading.Condition()
        threading.Thread(target=self._run, daemon=True, name="shard-prefetch").start()

    def advance_to(self, batch: int | None) -> None:
        """Tells the thread that training has taken all batches before `batch`; None ends it after this download."""
        with self._moved:
            self._reached = batch
            self._moved.notify()

    def _run(self) -> None:
        # Shard -> the first and the last batch known to need it.
        known = dict[int, tuple[int, int]]()
        for number, samples in enumerate(self._batches):
            for shard in np.unique(self._index.shards_of(samples)).tolist():
                first, _ = known.get(shard, (number, number))
                known[shard] = (first, number)
                if first < number:
                    continue
                if not self._wait_for_room(known):
                    return
                with suppress(ReadError, FetchUnavailable):
                    self._index.fetch(shard)

    def _wait_for_room(self, known: dict[int, tuple[int, int]]) -> bool:
        """Waits until the shards that no batch has needed yet fit into the window; False if the thread must end."""
        with self._moved:
            while self._reached is not None:
                for shard in [shard for shard, (_, last) in known.items() if last < self._reached]:
                    del known[shard]
                ahead = [self._sizes[shard] for shard, (first, _) in known.items() if first > self._reached]
                if len(ahead) <= 1 or sum(ahead) <= self._window:
                    return True
                self._moved.wait()
            return False
