"""The order of samples: a keyed permutation that is computed for each position on its own.

A Feistel network over a rectangle a x b >= N with cycle walking maps a position to a sample. It needs O(1) memory for
any N, no array and no state. A step is a slice of the epoch's order, and a rank's share is a slice of the step. So the
samples of a global batch do not depend on the number of ranks or workers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mae_vit.core.keyed_rng import RngStream, derive_key
from mae_vit.data.order.permutation import permute

if TYPE_CHECKING:
    from mae_vit.data.order.block_order import BlockOrder

# Windows (first, stop) of data steps first..stop-1 that a run skips, ascending, with at least one step between two
# windows. A run's n-th step takes the n-th data step that is not skipped: step and windows suffice to resume.
Skipped = tuple[tuple[int, int], ...]
# Positions per call of `Order.samples`. Larger calls cost the same per position.
_AT_ONCE = 4096


class Order(ABC):
    """Which samples make up each step: a pure function of (seed, epoch, position).

    Attributes:
        effective_batch_size: samples per step over all ranks.
        seed: the run's seed.
        repeats: how often in a row each sample occurs; divides the size of a micro-batch.
        blocks: the block order that the samples follow; None if each step reads from all shards.
    """

    effective_batch_size: int
    seed: int
    repeats: int = 1
    blocks: BlockOrder | None = None

    @property
    @abstractmethod
    def steps_per_epoch(self) -> int:
        """Whole batches per epoch. The remainder is dropped (different samples in each epoch)."""

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

    @property
    def steps_per_epoch(self) -> int:
        """Whole batches per epoch."""
        return self.num_samples // self.effective_batch_size

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
        self.order, self.repeats = order, repeats
        self.effective_batch_size = order.effective_batch_size * repeats
        self.seed, self.blocks = order.seed, order.blocks

    @property
    def steps_per_epoch(self) -> int:
        """Whole batches of views per epoch."""
        return self.order.steps_per_epoch // self.repeats

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
