"""Fetches the shards of coming steps while the present ones are trained on."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import suppress

import numpy as np

from mae_vit.batch import Batch
from mae_vit.data.index import ShardIndex
from mae_vit.data.shard_files import ReadError
from mae_vit.errors import Unreachable


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

    def reach(self, batch: int) -> None:
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
                with suppress(ReadError, Unreachable):
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


def with_prefetch(batches: Iterator[Batch], prefetcher: ShardPrefetcher) -> Iterator[Batch]:
    """Yields batches, and lets a prefetcher keep ahead of them."""
    prefetcher.start()
    try:
        for number, batch in enumerate(batches):
            prefetcher.reach(number)
            yield batch
    finally:
        prefetcher.end()
