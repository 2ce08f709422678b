"""The samples of one step, named for people: what an incident is to be looked into by."""

from __future__ import annotations

from typing import Any

import numpy as np

from mae_vit.data.index import ShardIndex
from mae_vit.data.order import Order


def samples_of_step(
    index: ShardIndex, order: Order, data_step: int, *, numbers: np.ndarray | None = None
) -> list[dict[str, Any]]:
    """Names the samples of a step of the data order, over all ranks, in order.

    Args:
        index: of the split.
        order: of the samples.
        data_step: steps of the order before it.
        numbers: in the split, of the samples that the order is over; None if it is over all.

    Returns:
        For each its number in the split, shard, key and label.
    """
    epoch, step = divmod(data_step, order.steps_per_epoch)
    size = order.effective_batch_size
    samples = order.samples(epoch, step * size, (step + 1) * size)
    if numbers is not None:
        samples = numbers[samples]
    return [
        {"sample": int(n), "shard": index.shard_of(n), "key": index.find_key(n), "label": int(label)}
        for n, label in zip(samples, index.labels_of(samples), strict=True)
    ]
