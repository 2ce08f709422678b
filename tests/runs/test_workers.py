"""Data workers: small from the start, no larger after many epochs, and without a copy of what lies in memory."""

import multiprocessing
from pathlib import Path

import numpy as np
import psutil
import pytest
from helpers.batch_digests import open_digits

from mae_vit.data.batches.loader import load_batches, start_worker_server
from mae_vit.data.index import open_index
from mae_vit.data.order.order import BlockOrder, GlobalOrder, RankSlice

EPOCHS = 8


@pytest.mark.skipif(not psutil.LINUX, reason="needs unique set sizes")
def test_memory_of_workers_stays_flat(many_shards):
    """An epoch's images of 64 px are 3 MiB for each worker: what is kept of them would show."""
    start_worker_server()
    index = open_index(many_shards, "train")
    counts = [shard.samples for shard in index.split_info.shards]
    order = BlockOrder(counts, effective_batch_size=96, seed=0, lanes=8, block_shards=2)
    source = open_digits(index, "tar", img_size=64)
    steps = order.steps_per_epoch
    batches = load_batches(source, order, RankSlice(), start_step=0, stop_step=EPOCHS * steps, workers=2)
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


def mapped(process: int, name: str) -> dict[str, int]:
    """KiB of each kind that a process has of a file mapped into its memory; empty where it maps none."""
    kinds: dict[str, int] = {}
    within = False
    for line in Path(f"/proc/{process}/smaps").read_text().splitlines():
        first, *rest = line.split()
        if not first.endswith(":"):
            within = line.endswith(name)
        elif within and rest[-1] == "kB":
            kinds[first[:-1]] = kinds.get(first[:-1], 0) + int(rest[0])
    return kinds


@pytest.mark.skipif(not psutil.LINUX, reason="reads /proc")
def test_workers_share_the_images_in_memory(many_shards):
    start_worker_server()
    index = open_index(many_shards, "train")
    order = GlobalOrder(len(index), 96, seed=0)
    source = open_digits(index, "memory", img_size=16)
    stop = order.steps_per_epoch
    # Mapped here too: a map that traveled would be a copy of the images.
    source.render(0, 0, np.arange(3))
    size = index.cache_path("uint8-1.npy").stat().st_size
    seen = 0
    batches = load_batches(source, order, RankSlice(), start_step=0, stop_step=stop, workers=2)
    for number, _ in enumerate(batches, start=1):
        if number == stop - 5:
            for worker in multiprocessing.active_children():
                seen += 1
                kinds = mapped(worker.pid, "uint8-1.npy")
                assert kinds.get("Rss", 0) * 1024 > size / 2
                assert kinds["Anonymous"] == kinds["Private_Dirty"] == 0
    assert seen == 2
