"""A rank's batches, and the remote shards that they need, fetched ahead."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import suppress

import numpy as np

from mae_vit.core.batch import Batch
from mae_vit.core.errors import FetchUnavailable
from mae_vit.core.progress import progress
from mae_vit.data.batches.sources import Source
from mae_vit.data.index import ShardIndex
from mae_vit.data.order.order import Order
from mae_vit.data.remote.folder import check_room
from mae_vit.data.shards.shard_files import ReadError


def check_cache(index: ShardIndex, source: Source, order: Order, *, world_size: int, node_ranks: int) -> None:
    """Refuses a cache in which shards would make room for each other while they are read.

    Raises:
        InputError: naming what is needed.
    """
    if index.remote is None or source.in_memory:
        return
    shards = index.split_info.shards
    needed, why = sum(shard.bytes for shard in shards), 'data.order="global"'
    if blocks := order.blocks:
        # A lane is within one block, or passes from one into the next; and what comes then.
        lanes = max(1, -(-blocks.lanes * node_ranks // world_size))
        largest = max(shard.bytes for shard in shards)
        needed, why = min(needed, 3 * lanes * blocks.block_shards * largest), 'data.order="blocks"'
    check_room(index.remote, needed, why)


def fetch_split(index: ShardIndex, source: Source, order: Order, *, say: bool) -> None:
    """Fetches a whole split, where each step is to read from everywhere in it: before ranks wait for each other.

    Args:
        index: of the split.
        source: of its images.
        order: of the samples.
        say: whether this process shows how far it is.

    Raises:
        FetchUnavailable: if it does not come.
    """
    if index.remote is None or source.in_memory or order.blocks is not None:
        return
    shards = index.split_info.shards
    with progress(
        total=sum(shard.bytes for shard in shards),
        desc="fetching shards",
        unit="B",
        unit_scale=True,
        delay=2,
        disable=not say,
    ) as bar:
        for number, shard in enumerate(shards):
            with suppress(ReadError):  # told of when it is read
                index.fetch(number)
            bar.update(shard.bytes)


def fetch_ahead(
    batches: Iterator[Batch], index: ShardIndex, coming: Iterator[np.ndarray], *, node_ranks: int
) -> Iterator[Batch]:
    """Yields batches while a thread fetches the remote shards of those to come.

    Args:
        batches: of the split; their number goes with that of `coming`.
        index: of the split.
        coming: sample numbers of each batch.
        node_ranks: ranks that share this node's cache.
    """
    assert index.remote is not None
    # The rest is for what is read, in one block of each lane or two.
    prefetcher = ShardPrefetcher(index, coming, window_bytes=index.remote.cache_bytes // (3 * node_ranks))
    prefetcher.start()
    try:
        for number, batch in enumerate(batches):
            prefetcher.advance_to(number)
            yield batch
    finally:
        prefetcher.end()


class ShardPrefetcher:
    """A thread that goes through the samples of coming batches, and fetches their shards.

    It stays `window_bytes` ahead: what it fetches earlier would make room before it is read.
    What it cannot have, whoever reads it will ask for again, and say so.
    """

    def __init__(self, index: ShardIndex, batches: Iterator[np.ndarray], window_bytes: int) -> None:
        """Fetches nothing yet.

        Args:
            index: of the shards.
            batches: sample numbers of each batch to come.
            window_bytes: of shards that are fetched before the batch that needs them.
        """
        self._index, self._batches, self._window = index, batches, window_bytes
        self._sizes = [shard.bytes for shard in index.split_info.shards]
        self._reached, self._ended = 0, False
        self._moved = threading.Condition()
        self._thread = threading.Thread(target=self._run, daemon=True, name="shard-prefetch")

    def start(self) -> None:
        """Begins with the first batch."""
        self._thread.start()

    def advance_to(self, batch: int) -> None:
        """Hears that the batches before `batch` were taken."""
        with self._moved:
            self._reached = batch
            self._moved.notify()

    def end(self) -> None:
        """Fetches no more; what is under way is let finish."""
        with self._moved:
            self._ended = True
            self._moved.notify()

    def _run(self) -> None:
        # By shard, the first and the last batch that it is known to serve.
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
        """Waits until the shards that nobody reads yet fit into the window; False at the end."""
        with self._moved:
            while not self._ended:
                for shard in [shard for shard, (_, last) in known.items() if last < self._reached]:
                    del known[shard]
                ahead = [self._sizes[shard] for shard, (first, _) in known.items() if first > self._reached]
                if len(ahead) <= 1 or sum(ahead) <= self._window:
                    return True
                self._moved.wait()
            return False
