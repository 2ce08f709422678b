"""Training batches from where the shards lie: here, or elsewhere and fetched ahead."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from mae_vit.batch import Batch
from mae_vit.data.blocks import BlockOrder
from mae_vit.data.index import ShardIndex
from mae_vit.data.loader import load_batches
from mae_vit.data.order import Order, Share, micro_batches, unrepeated
from mae_vit.data.reading import MemorySource, Source
from mae_vit.data.remote.folder import check_room
from mae_vit.data.remote.prefetch import ShardPrefetcher, with_prefetch
from mae_vit.data.shard_files import ReadError
from mae_vit.data.subset import SubsetSource
from mae_vit.progress import progress
from mae_vit.skipping import Skipped


def check_cache(index: ShardIndex, source: Source, order: Order, *, world_size: int, node_ranks: int) -> None:
    """Refuses a cache in which shards would make room for each other while they are read.

    Raises:
        InputError: naming what is needed.
    """
    if index.remote is None or _in_memory(source):
        return
    shards = index.split_info.shards
    order = unrepeated(order)
    needed, why = sum(shard.bytes for shard in shards), 'data.order="global"'
    if isinstance(order, BlockOrder):
        # A lane is within one block, or passes from one into the next; and what comes then.
        lanes = max(1, -(-order.lanes * node_ranks // world_size))
        largest = max(shard.bytes for shard in shards)
        needed, why = min(needed, 3 * lanes * order.block_shards * largest), 'data.order="blocks"'
    check_room(index.remote, needed, why)


def bring(index: ShardIndex, source: Source, order: Order, *, say: bool) -> None:
    """Fetches a whole split, where each step is to read from everywhere in it: before ranks wait for each other.

    Args:
        index: of the split.
        source: of its images.
        order: of the samples.
        say: whether this process shows how far it is.

    Raises:
        Unreachable: if it does not come.
    """
    if index.remote is None or _in_memory(source) or isinstance(unrepeated(order), BlockOrder):
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


def training_batches(
    index: ShardIndex,
    source: Source,
    order: Order,
    share: Share,
    *,
    node_ranks: int,
    start_step: int,
    stop_step: int,
    skipped: Skipped,
    workers: int,
    pin_memory: bool,
) -> Iterator[Batch]:
    """Yields a rank's micro-batches, as `mae_vit.data.loader.load_batches`.

    Args:
        index: of the split.
        source: of its images, or of some of them.
        order: of the samples of `source`.
        share: of each step.
        node_ranks: ranks that share this node's cache.
        start_step: first optimizer step.
        stop_step: one past the last.
        skipped: steps of the order that are left out.
        workers: data processes.
        pin_memory: for copies to a GPU.
    """
    batches = load_batches(
        source,
        order,
        share,
        start_step=start_step,
        stop_step=stop_step,
        skipped=skipped,
        workers=workers,
        pin_memory=pin_memory,
    )
    if index.remote is None or _in_memory(source):
        return batches
    coming = micro_batches(order, share, start_step=start_step, stop_step=stop_step, skipped=skipped)
    numbers = source.samples if isinstance(source, SubsetSource) else None
    # The rest is for what is read, in one block of each lane or two.
    prefetcher = ShardPrefetcher(
        index,
        (places if numbers is None else numbers[places] for _, places in coming),
        window_bytes=index.remote.cache_bytes // (3 * node_ranks),
    )
    return with_prefetch(batches, prefetcher)


def _in_memory(source: Source) -> bool:
    return isinstance(source.source if isinstance(source, SubsetSource) else source, MemorySource)
