"""What data workers know of shards: names and sizes, in arrays.

`dataset.json` as objects takes 100 MB for 100,000 shards, in each process that has it. It
stays in the trainer.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


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
