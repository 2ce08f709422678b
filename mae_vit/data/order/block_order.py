"""The order mode `blocks`: a rank reads few shards at a time, which suits shared file systems.

Each epoch permutes the shards. Every `block_shards` of them form a block, and each block permutes its samples. The
resulting stream of samples is cut into `lanes` equal segments. Every step takes an equal part of each segment.

A rank that computes whole lanes reads only the shards of these lanes, block by block. The batch over all ranks is the
same for any number of ranks. Lanes cut the stream of samples, not the list of shards, so they have equal lengths.

Each position is computed on its own. Memory grows with the number of shards, not of samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mae_vit.core.keyed_rng import MASK32, RngStream, derive_key, threefry2x32
from mae_vit.data.order.order import Order, RankSlice
from mae_vit.data.order.permutation import permute


@dataclass(frozen=True)
class _Layout:
    """The stream of one epoch.

    Attributes:
        shards: (S,), shard numbers in the order of the stream.
        shard_starts: (S + 1,), the position in the stream where each shard begins; the last is N.
        block_starts: (blocks + 1,), the position where each block begins; the last is N.
        block_keys: two arrays uint32 (blocks,): the key that permutes each block's samples.
    """

    shards: np.ndarray
    shard_starts: np.ndarray
    block_starts: np.ndarray
    block_keys: tuple[np.ndarray, np.ndarray]


class BlockOrder(Order):
    """The order mode `blocks`.

    Attributes:
        effective_batch_size: samples per step over all ranks, a multiple of `lanes`.
        seed: the run's seed.
        lanes: number of segments of the stream; each gives an equal part of every step.
        block_shards: shards per block; their samples are permuted together.
        num_samples: N, over all shards.
        num_blocks: blocks per epoch; the last one may have fewer shards.
    """

    def __init__(
        self,
        shard_samples: Sequence[int],
        *,
        effective_batch_size: int,
        seed: int,
        lanes: int,
        block_shards: int,
    ) -> None:
        """Orders the samples of the shards. Shard i has `shard_samples[i]` samples; numbers continue across shards."""
        self._counts = np.asarray(shard_samples, np.int64)
        self._firsts = np.cumsum(self._counts) - self._counts
        self.effective_batch_size = effective_batch_size
        self.seed = seed
        self.lanes = lanes
        self.block_shards = block_shards
        self.num_samples = int(self._counts.sum())
        self.num_blocks = -(-len(self._counts) // block_shards)
        self._latest: tuple[int, _Layout] | None = None
        self.blocks = self

    @property
    def steps_per_epoch(self) -> int:
        """Whole batches per epoch. The end of each lane is dropped (different samples in each epoch)."""
        return self.num_samples // self.effective_batch_size

    def samples(self, epoch: int, start: int, stop: int) -> np.ndarray:
        """Returns the samples at positions start..stop-1 of an epoch, int64. A batch holds lane 0, then lane 1, ..."""
        layout = self._layout(epoch)
        # Position -> lane and place in it -> position in the stream -> permuted within its block -> shard -> sample.
        step, place = np.divmod(np.arange(start, stop), self.effective_batch_size)
        lane, within = np.divmod(place, self._per_lane)
        stream = lane * self._lane_length + step * self._per_lane + within
        block = np.searchsorted(layout.block_starts, stream, side="right") - 1
        begin = layout.block_starts[block]
        size = layout.block_starts[block + 1] - begin
        key = (layout.block_keys[0][block], layout.block_keys[1][block])
        stream = begin + permute(stream - begin, size, key)
        slot = np.searchsorted(layout.shard_starts, stream, side="right") - 1
        return self._firsts[layout.shards[slot]] + stream - layout.shard_starts[slot]

    def shards_of(self, rank_slice: RankSlice, epoch: int) -> np.ndarray:
        """Returns the shards that a rank may open in an epoch, in stream order: those of all blocks in its lanes."""
        layout = self._layout(epoch)
        per_rank = self.effective_batch_size // rank_slice.world_size
        first_lane = rank_slice.rank * per_rank // self._per_lane
        last_lane = ((rank_slice.rank + 1) * per_rank - 1) // self._per_lane
        ends = np.array([first_lane * self._lane_length, (last_lane + 1) * self._lane_length - 1])
        first, last = np.searchsorted(layout.block_starts, ends, side="right") - 1
        return layout.shards[first * self.block_shards : (last + 1) * self.block_shards]

    @property
    def _per_lane(self) -> int:
        """Samples per step from each lane."""
        return self.effective_batch_size // self.lanes

    @property
    def _lane_length(self) -> int:
        return self.num_samples // self.lanes

    def _layout(self, epoch: int) -> _Layout:
        if self._latest is None or self._latest[0] != epoch:
            self._latest = (epoch, self._lay_out(epoch))
        return self._latest[1]

    def _lay_out(self, epoch: int) -> _Layout:
        key = derive_key(self.seed, RngStream.ORDER, epoch)
        shards = permute(np.arange(len(self._counts)), len(self._counts), key)
        starts = np.concatenate([[0], np.cumsum(self._counts[shards])])
        blocks = np.arange(self.num_blocks, dtype=np.uint32)
        return _Layout(
            shards=shards,
            shard_starts=starts,
            block_starts=np.append(starts[:-1][:: self.block_shards], starts[-1]),
            # `permute` counts rounds in the second counter, which never reach this value. So block keys are
            # independent of the draws that permute the shards.
            block_keys=threefry2x32(key, blocks, np.full_like(blocks, MASK32)),
        )
