"""The order of samples: a keyed permutation that is computed for each position on its own.

A Feistel network over a rectangle a x b >= N with cycle walking maps a position to a sample. It needs O(1) memory for
any N, no array and no state. A step is a slice of the epoch's order, and a rank's share is a slice of the step. So the
samples of a global batch do not depend on the number of ranks or workers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from mae_vit.core.keyed_rng import MASK32, RngStream, derive_key, threefry2x32
from mae_vit.data.order.permutation import permute

# Windows (first, stop) of data steps first..stop-1 that a run skips, ascending, with at least one step between two
# windows. A run's n-th step takes the n-th data step that is not skipped: step and windows suffice to resume.
Skipped = tuple[tuple[int, int], ...]
# Positions per call of `Order.samples`. Larger calls cost the same per position.
_AT_ONCE = 4096


class Order(ABC):
    """Which samples make up each step: a pure function of (seed, epoch, position).

    Attributes:
        num_samples: N, all samples.
        effective_batch_size: samples per step over all ranks.
        seed: the run's seed.
        repeats: how often in a row each sample occurs; divides the size of a micro-batch.
        blocks: the block order that the samples follow; None if each step reads from all shards.
    """

    num_samples: int
    effective_batch_size: int
    seed: int
    repeats: int = 1
    blocks: BlockOrder | None = None

    @property
    def steps_per_epoch(self) -> int:
        """Whole batches per epoch. The remainder is dropped (different samples in each epoch)."""
        return self.num_samples // self.effective_batch_size

    @abstractmethod
    def samples(self, epoch: int, start: int, stop: int) -> np.ndarray:
        """Returns the samples at positions start..stop-1 of an epoch, int64.

        Position p is sample p % effective_batch_size of step p // effective_batch_size.
        """


class GlobalOrder(Order):
    """The order mode `global`: each epoch is a fresh permutation of all samples."""

    def __init__(self, num_samples: int, effective_batch_size: int, seed: int) -> None:
        """Orders the samples 0..num_samples-1."""
        self.num_samples, self.effective_batch_size, self.seed = num_samples, effective_batch_size, seed

    def samples(self, epoch: int, start: int, stop: int) -> np.ndarray:
        """Returns the samples at positions start..stop-1 of an epoch, int64."""
        key = derive_key(self.seed, RngStream.ORDER, epoch)
        return permute(np.arange(start, stop), self.num_samples, key)


class RepeatedOrder(Order):
    """Repeated augmentation: each sample occurs several times in a row, as views of an image that is decoded once.

    Hoffer et al., "Augment your batch", CVPR 2020, as in MAE for video (Feichtenhofer et al., NeurIPS 2022). An epoch
    has as many views as there are samples. `repeats` epochs see all samples; each takes one part of the same order.
    """

    def __init__(self, order: Order, repeats: int) -> None:
        """Repeats each sample of an order, whose effective batch is smaller by the factor `repeats`."""
        self.order, self.repeats, self.num_samples = order, repeats, order.num_samples
        self.effective_batch_size = order.effective_batch_size * repeats
        self.seed, self.blocks = order.seed, order.blocks

    def samples(self, epoch: int, start: int, stop: int) -> np.ndarray:
        """Returns the samples at positions start..stop-1 of an epoch of views, int64."""
        # `repeats` epochs of views share one epoch `turn` of the samples' order; `part` says which part.
        turn, part = divmod(epoch, self.repeats)
        before = part * self.steps_per_epoch * self.order.effective_batch_size
        first, last = start // self.repeats, -(-stop // self.repeats)
        once = self.order.samples(turn, before + first, before + last)
        return np.repeat(once, self.repeats)[start - first * self.repeats :][: stop - start]


def view_keys(samples: np.ndarray, repeats: int) -> np.ndarray:
    """Numbers the views of samples that occur `repeats` times in a row. The number is the key of a view's random draws.

    Args:
        samples: int64 (B,); begins with the first view of a sample.
        repeats: r; the views of a sample are r * sample, r * sample + 1, ...

    Returns:
        int64 (B,).
    """
    return samples if repeats == 1 else samples * repeats + np.arange(len(samples)) % repeats


@dataclass(frozen=True)
class RankSlice:
    """The slice of every global batch that one rank computes, in micro-batches.

    Attributes:
        rank: this process's rank.
        world_size: number of ranks; divides the effective batch.
        accumulation: micro-batches per step.
    """

    rank: int = 0
    world_size: int = 1
    accumulation: int = 1


def micro_batches(
    order: Order, rank_slice: RankSlice, *, start_step: int, stop_step: int, skipped: Skipped = ()
) -> Iterator[tuple[int, np.ndarray]]:
    """Yields (epoch, sample indices int64) of a rank's micro-batches in steps start_step..stop_step-1.

    The rank's slice of a step is contiguous, as is each micro-batch in it. Later data steps replace those in `skipped`.
    """
    size = order.effective_batch_size
    per_rank = size // rank_slice.world_size
    micro = per_rank // rank_slice.accumulation
    # For small batches, compute several steps per call: the cost is per call, not per position.
    ahead = max(1, _AT_ONCE // size)
    held, samples = (-1, -1), np.zeros(0, np.int64)
    for step in range(start_step, stop_step):
        epoch, step_in_epoch = divmod(data_step(step, skipped), order.steps_per_epoch)
        chunk, number_in_chunk = divmod(step_in_epoch, ahead)
        start = number_in_chunk * size + rank_slice.rank * per_rank
        if ahead == 1:
            first = step_in_epoch * size + start
            samples, start = order.samples(epoch, first, first + per_rank), 0
        elif held != (epoch, chunk):
            held, last = (epoch, chunk), min((chunk + 1) * ahead, order.steps_per_epoch)
            samples = order.samples(epoch, chunk * ahead * size, last * size)
        for number in range(rank_slice.accumulation):
            yield epoch, samples[start + number * micro : start + (number + 1) * micro]


def data_step(step: int, skipped: Skipped) -> int:
    """Returns the data step that a run's step takes; both count from 0."""
    for first, stop in skipped:
        if step < first:
            break
        step += stop - first
    return step


def skip(skipped: Skipped, first: int, stop: int) -> Skipped:
    """Adds the data steps first..stop-1 to the skipped windows."""
    merged: list[tuple[int, int]] = []
    for start, end in sorted([*skipped, (first, stop)]):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return tuple(merged)


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
    """The order mode `blocks`: a rank reads few shards at a time, which suits shared file systems.

    Each epoch permutes the shards. Every `block_shards` of them form a block, and each block permutes its samples. The
    resulting stream of samples is cut into `lanes` equal segments. Every step takes an equal part of each segment.

    A rank that computes whole lanes reads only the shards of these lanes, block by block. The batch over all ranks is
    the same for any number of ranks. Lanes cut the stream of samples, not the list of shards, so they have equal
    lengths, and the end of each is dropped. Each position is computed on its own. Memory grows with the number of
    shards, not of samples.

    Attributes:
        lanes: number of segments of the stream; each gives an equal part of every step. Divides the effective batch.
        block_shards: shards per block; their samples are permuted together.
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
        self.blocks = self
        self._layout = lru_cache(maxsize=1)(self._lay_out)

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
