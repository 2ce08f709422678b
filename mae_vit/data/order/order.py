"""The order of samples: a keyed permutation, computed at any position on its own.

Position -> sample is a Feistel network over a rectangle a x b >= N with cycle
walking: O(1) memory at any N, no array, no state. A step is a slice of the
epoch's order; a rank's share is a slice of the step, so the samples of a global
batch do not depend on how many ranks or workers there are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np

from mae_vit.core.keyed_rng import RngStream, derive_key
from mae_vit.data.order.permutation import permute
from mae_vit.data.order.skipped_steps import Skipped, data_step

if TYPE_CHECKING:
    from mae_vit.data.order.block_order import BlockOrder

# Positions: more in a call take as long for each.
_AT_ONCE = 4096


class Order(Protocol):
    """Which samples make up each step: a pure function of (seed, epoch, position)."""

    @property
    def effective_batch_size(self) -> int:
        """Samples of a step over all ranks."""

    @property
    def seed(self) -> int:
        """The run's seed."""

    @property
    def repeats(self) -> int:
        """How often in a row each sample comes; divides every micro-batch."""

    @property
    def blocks(self) -> BlockOrder | None:
        """The order of shards that the samples follow; None where each step reads from everywhere."""

    @property
    def steps_per_epoch(self) -> int:
        """Whole batches of an epoch."""

    def samples(self, epoch: int, start: int, stop: int) -> np.ndarray:
        """Returns the samples at positions start..stop-1 of an epoch's batches laid end to end, int64."""


@dataclass(frozen=True)
class GlobalOrder:
    """The order mode `global`: each epoch a fresh permutation of all samples.

    Attributes:
        num_samples: N.
        effective_batch_size: samples of a step over all ranks.
        seed: the run's seed.
        repeats: 1.
        blocks: None.
    """

    num_samples: int
    effective_batch_size: int
    seed: int
    repeats: int = field(default=1, init=False)
    blocks: None = field(default=None, init=False)

    @property
    def steps_per_epoch(self) -> int:
        """Whole batches; the remainder of each epoch is dropped (another one each epoch)."""
        return self.num_samples // self.effective_batch_size

    def samples(self, epoch: int, start: int, stop: int) -> np.ndarray:
        """Returns the samples at positions start..stop-1 of an epoch's order, int64."""
        key = derive_key(self.seed, RngStream.ORDER, epoch)
        return permute(np.arange(start, stop), self.num_samples, key)


@dataclass(frozen=True)
class RepeatedOrder:
    """Each sample several times in a row: views of an image that is decoded once for all of them.

    Repeated augmentation (Hoffer et al., "Augment your batch", CVPR 2020), as MAE for video has it
    (Feichtenhofer et al., NeurIPS 2022). An epoch is as many views as there are samples: to see
    all of them takes `repeats` epochs, each with its part of one order.

    Attributes:
        order: of the samples, in batches that are as much smaller.
        repeats: how often in a row each one comes; divides every micro-batch.
    """

    order: Order
    repeats: int

    @property
    def effective_batch_size(self) -> int:
        """Views of a step over all ranks."""
        return self.order.effective_batch_size * self.repeats

    @property
    def seed(self) -> int:
        """The run's seed."""
        return self.order.seed

    @property
    def blocks(self) -> BlockOrder | None:
        """Those of the samples' order."""
        return self.order.blocks

    @property
    def steps_per_epoch(self) -> int:
        """Whole batches of views."""
        return self.order.steps_per_epoch // self.repeats

    def samples(self, epoch: int, start: int, stop: int) -> np.ndarray:
        """Returns the samples at positions start..stop-1 of an epoch's batches laid end to end, int64."""
        turn, part = divmod(epoch, self.repeats)
        before = part * self.steps_per_epoch * self.order.effective_batch_size
        first, last = start // self.repeats, -(-stop // self.repeats)
        once = self.order.samples(turn, before + first, before + last)
        return np.repeat(once, self.repeats)[start - first * self.repeats :][: stop - start]


def view_keys(samples: np.ndarray, repeats: int) -> np.ndarray:
    """Numbers the views of samples that come `repeats` times in a row: what their randomness is keyed by.

    Args:
        samples: int64 (B,), from the first view of a sample on.
        repeats: r; a sample's views are r * sample, r * sample + 1, ...
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
    order: Order, share: RankSlice, *, start_step: int, stop_step: int, skipped: Skipped = ()
) -> Iterator[tuple[int, np.ndarray]]:
    """Yields (epoch, sample indices) of a rank's micro-batches, from any step on.

    The rank's slice of a step is contiguous, and so is each micro-batch in it. `skipped` steps
    of the order are left out: the steps after them move up.
    """
    size = order.effective_batch_size
    per_rank = size // share.world_size
    micro = per_rank // share.accumulation
    # Of small batches those of several steps at once: the cost is one of calls, not of numbers.
    ahead = max(1, _AT_ONCE // size)
    held, samples = (-1, -1), np.zeros(0, np.int64)
    for step in range(start_step, stop_step):
        epoch, step_in_epoch = divmod(data_step(step, skipped), order.steps_per_epoch)
        block, number_in_block = divmod(step_in_epoch, ahead)
        start = number_in_block * size + share.rank * per_rank
        if ahead == 1:
            first = step_in_epoch * size + start
            samples, start = order.samples(epoch, first, first + per_rank), 0
        elif held != (epoch, block):
            held, last = (epoch, block), min((block + 1) * ahead, order.steps_per_epoch)
            samples = order.samples(epoch, block * ahead * size, last * size)
        for number in range(share.accumulation):
            yield epoch, samples[start + number * micro : start + (number + 1) * micro]
