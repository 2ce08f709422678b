"""The order mode `blocks`: near samples lie in few shards, for shared file systems.

In each epoch the shards are permuted, runs of `block_shards` of them are blocks, and
the samples of a block are permuted among themselves. The stream that results is cut
into `lanes` equal segments, and every step takes an equal part of each. A rank whose
share of the batch is whole lanes reads only their shards, block by block, while the
batch over all ranks is the same for any number of them. The stream of samples is cut
rather than the list of shards: lanes are of one length whatever the shards hold.

Each position is still computed on its own; what is kept is as long as the list of
shards, not of samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mae_vit.core.keyed_rng import MASK32, RngStream, derive_key, threefry2x32
from mae_vit.data.order.order import RankSlice
from mae_vit.data.order.permutation import permute


@dataclass(frozen=True)
class _Layout:
    """One epoch's stream.

    Attributes:
        shards: (S,) shard numbers in order.
        shard_starts: (S + 1,) where in the stream each begins; the last is the end.
        block_starts: (blocks + 1,) the same of the blocks.
        block_keys: two words (blocks,) each, uint32.
    """

    shards: np.ndarray
    shard_starts: np.ndarray
    block_starts: np.ndarray
    block_keys: tuple[np.ndarray, np.ndarray]


class BlockOrder:
    """The order mode `blocks`.

    Attributes:
        effective_batch_size: samples of a step over all ranks; `lanes` divides it.
        seed: the run's seed.
        lanes: segments of the stream; each gives an equal part of every step.
        block_shards: shards whose samples are permuted together.
        num_samples: N, over all shards.
        repeats: 1.
        num_blocks: of an epoch.
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
        """Orders the samples of shards that hold `shard_samples` each, numbered through in this order."""
        self._counts = np.asarray(shard_samples, np.int64)
        self._firsts = np.cumsum(self._counts) - self._counts
        self.effective_batch_size = effective_batch_size
        self.seed = seed
        self.lanes = lanes
        self.block_shards = block_shards
        self.num_samples = int(self._counts.sum())
        self.repeats = 1
        self.num_blocks = -(-len(self._counts) // block_shards)
        self._latest: tuple[int, _Layout] | None = None

    @property
    def blocks(self) -> BlockOrder:
        """Itself."""
        return self

    @property
    def steps_per_epoch(self) -> int:
        """Whole batches; the end of each lane is dropped (other samples each epoch)."""
        return self.num_samples // self.effective_batch_size

    def samples(self, epoch: int, start: int, stop: int) -> np.ndarray:
        """Returns the samples at positions start..stop-1 of an epoch's batches laid end to end, int64.

        A batch holds its part of lane 0, then of lane 1, and so on.
        """
        layout = self._layout(epoch)
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

    def shards_of(self, share: RankSlice, epoch: int) -> np.ndarray:
        """Returns the shards that a rank may open in an epoch, in their order there.

        Those of its lanes, and of the blocks in which these begin and end.
        """
        layout = self._layout(epoch)
        per_rank = self.effective_batch_size // share.world_size
        first_lane = share.rank * per_rank // self._per_lane
        last_lane = ((share.rank + 1) * per_rank - 1) // self._per_lane
        ends = np.array([first_lane * self._lane_length, (last_lane + 1) * self._lane_length - 1])
        first, last = np.searchsorted(layout.block_starts, ends, side="right") - 1
        return layout.shards[first * self.block_shards : (last + 1) * self.block_shards]

    @property
    def _per_lane(self) -> int:
        """Samples that a step takes from each lane."""
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
            # The second counter sets these apart from the draws that permute the
            # shards, which count rounds there.
            block_keys=threefry2x32(key, blocks, np.full_like(blocks, MASK32)),
        )
