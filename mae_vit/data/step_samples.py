"""The samples of one step, named for people: what an incident is to be looked into by."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from mae_vit.data.index import ShardIndex
from mae_vit.data.order import Order
from mae_vit.data.samples import split_key

_BLOCK = 512
_NAME_LENGTH = 100


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
    return [_name(index, int(sample)) for sample in samples]


def _name(index: ShardIndex, sample: int) -> dict[str, Any]:
    shard, offset = index.locate(sample)
    return {
        "sample": sample,
        "shard": shard.name,
        "key": split_key(_member_name(shard, offset))[0],
        "label": int(index.labels[sample]),
    }


def _member_name(shard: Path, offset: int) -> str:
    """The name in the header right before a member; of a very long one, its beginning.

    One small read, where walking the whole tar would take a read for each member before it.
    """
    try:
        with shard.open("rb") as file:
            file.seek(max(0, offset - _BLOCK))
            return file.read(_NAME_LENGTH).split(b"\0", 1)[0].decode("utf-8", "surrogateescape")
    except OSError:
        return ""
