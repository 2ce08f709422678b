"""Data workers: small from the start, and no larger after many epochs."""

import multiprocessing

import psutil
import pytest
from batches import open_digits

from mae_vit.data.blocks import BlockOrder
from mae_vit.data.index import open_index
from mae_vit.data.loader import load_batches, start_worker_server
from mae_vit.data.order import GlobalOrder, Share

EPOCHS = 8


@pytest.mark.skipif(not psutil.LINUX, reason="needs unique set sizes")
@pytest.mark.parametrize("mode", ["global", "blocks"])
def test_memory_of_workers_stays_flat(many_shards, mode):
    """An epoch's images of 64 px are 3 MiB for each worker: what is kept of them would show."""
    start_worker_server()
    index = open_index(many_shards, "train")
    counts = [shard.samples for shard in index.split_info.shards]
    order = (
        GlobalOrder(len(index), 96, seed=0)
        if mode == "global"
        else BlockOrder(counts, effective_batch_size=96, seed=0, lanes=8, block_shards=2)
    )
    source = open_digits(index, "tar", img_size=64)
    steps = order.steps_per_epoch
    batches = load_batches(source, order, Share(), start_step=0, stop_step=EPOCHS * steps, workers=2)
    used = []  # MiB of each worker, early and late
    for number, _ in enumerate(batches, start=1):
        # After two epochs all shards were open once. Before the last ends, for workers leave then.
        if number in (2 * steps, EPOCHS * steps - 8):
            workers = multiprocessing.active_children()
            assert len(workers) == 2
            used.append([psutil.Process(worker.pid).memory_full_info().uss / 2**20 for worker in workers])
    # Preloaded in the server that they are forked from; 404 MiB without.
    assert max(used[0]) < 64, used
    assert max(after - before for before, after in zip(*used, strict=True)) < 4, used
