"""The folder of fetched shards: one process fetches each, within a bound, before it is read."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress

import pytest
from helpers.batch_digests import digest_of_global_batches, open_digits, open_located
from helpers.commands import ROOT, wait_until
from helpers.servers.remote_shards import (
    STEPS,
    blocks,
    fetch_all,
    first_shard,
    open_cache,
    wanted,
)

from mae_vit.core.urls import file_url
from mae_vit.data.batches.loader import load_batches
from mae_vit.data.batches.prefetch import fetch_ahead
from mae_vit.data.data_path import resolve_data_path
from mae_vit.data.order.order import RankSlice, micro_batches
from mae_vit.data.shards.dataset_json import read_dataset

pytestmark = pytest.mark.usefixtures("impatient")


def test_of_many_processes_one_fetches(source, server, tmp_path):
    server.delay_s = 0.01
    (tmp_path / "cache").mkdir()
    context = multiprocessing.get_context("spawn")
    started = context.Event()
    arguments = (server.url, str(source), str(tmp_path / "cache"), 1 << 30, started)
    processes = [context.Process(target=fetch_all, args=arguments) for _ in range(3)]
    for process in processes:
        process.start()
    started.set()
    for process in processes:
        process.join(100)
        assert process.exitcode == 0
    names = [name for name, _ in server.requests]
    assert len(names) == len(set(names)) == 64


def test_after_a_killed_fetch_the_next_one_begins_anew(source, server, tmp_path):
    shard = first_shard(source)
    server.faults["*.tar"] = ["stall"]
    (tmp_path / "cache").mkdir()
    code = (
        "from pathlib import Path; from mae_vit.data.remote.cache import Cache, RemoteFile; "
        f"Cache(Path({str(tmp_path / 'cache')!r}), 1 << 30).fetch(RemoteFile({file_url(server.url, shard.file)!r}, "
        f"{shard.bytes}, {shard.sha256!r}))"
    )
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    part = tmp_path / "cache" / f".{shard.sha256}-{shard.bytes}.part"
    wait_until(lambda: part.exists() and part.stat().st_size)
    process.send_signal(signal.SIGKILL)
    process.wait()
    path = open_cache(tmp_path).fetch(wanted(server, shard))
    assert path.read_bytes() == (source / shard.file).read_bytes()
    assert not part.exists()


@contextmanager
def watched(folder):
    """Yields a list that at the end holds the most bytes that were in a folder at once."""
    largest, ended = [0], threading.Event()

    def sizes():
        # By inode: one that gets its name meanwhile may be listed twice.
        found = {}
        for entry in os.scandir(folder):
            with suppress(FileNotFoundError):
                found[entry.inode()] = entry.stat().st_size
        return found

    def watch():
        before = {}
        while not ended.is_set():
            now = sizes()
            # Files grow until they go: if none went since the last look, all that was seen then was there at once.
            if all(now.get(inode, -1) >= size for inode, size in before.items()):
                largest[0] = max(largest[0], sum(before.values()))
            before = now
            time.sleep(0.002)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield largest
    finally:
        ended.set()
        thread.join()


def test_the_cache_stays_within_its_bound(source, server, tmp_path):
    """And what makes room is what was used longest ago."""
    shards = read_dataset(source).splits["train"].shards
    limit = 7 * max(shard.bytes for shard in shards)
    folder = resolve_data_path(server.url, cache_dir=str(tmp_path / "cache"), cache_gib=limit / 2**30)
    index = open_located(folder)
    order = blocks(index)
    near = digest_of_global_batches(source, order, "tar", 1, 0, STEPS)
    with watched(tmp_path / "cache" / "mae-vit-shards") as largest:
        far = digest_of_global_batches(folder, order, "tar", 2, 2, STEPS)
    assert far == near
    assert 0 < largest[0] <= limit


def shards_asked(server) -> list[str]:
    return [name for name, _ in server.requests if name.endswith(".tar")]


def fetched_batches(index):
    """An epoch of one rank."""
    order, share, source = blocks(index), RankSlice(), open_digits(index, "tar")
    steps = {"start_step": 0, "stop_step": order.steps_per_epoch}
    coming = (source.numbers(places) for _, places in micro_batches(order, share, **steps))
    return fetch_ahead(load_batches(source, order, share, **steps), index, coming, node_ranks=1)


def test_shards_come_before_they_are_read(server, tmp_path):
    folder = resolve_data_path(server.url, cache_dir=str(tmp_path / "cache"))
    index = open_located(folder)
    batches = fetched_batches(index)
    next(batches)
    wait_until(lambda: len(set(shards_asked(server))) == 64)
    list(batches)
    assert len(shards_asked(server)) == 64
    batches.close()
    wait_until(lambda: not any(thread.name == "shard-prefetch" for thread in threading.enumerate()))


def test_prefetching_stays_within_its_window(source, server, tmp_path):
    shards = read_dataset(source).splits["train"].shards
    limit = 40 * max(shard.bytes for shard in shards)
    folder = resolve_data_path(server.url, cache_dir=str(tmp_path / "cache"), cache_gib=limit / 2**30)
    index = open_located(folder)
    order = blocks(index)
    batches = fetched_batches(index)
    next(batches)
    before: set[str] | None = None
    fetched: set[str] = set()
    # Until nothing more comes: on a busy machine that takes longer.
    while len(fetched) < 2 or fetched != before:
        time.sleep(2)
        before, fetched = fetched, set(shards_asked(server))
    sizes = {shard.file: shard.bytes for shard in shards}
    _, samples = next(iter(micro_batches(order, RankSlice(), start_step=0, stop_step=1)))
    first = {shards[n].file for n in index.shards_of(samples)}
    ahead = sum(sizes[name] for name in fetched - first)
    assert 0 < ahead <= limit // 2
    list(batches)
