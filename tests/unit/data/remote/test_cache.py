"""The folder of fetched shards: what makes room, and when a file gets its name."""

import fcntl
import os
import subprocess
import sys
import threading

import pytest
from helpers.batch_digests import open_digits, open_located
from helpers.servers.remote_shards import (
    blocks,
    first_shard,
    open_cache,
    wanted,
)

from mae_vit.core.errors import InputError
from mae_vit.data.batches.prefetch import check_cache
from mae_vit.data.data_path import resolve_data_path
from mae_vit.data.order.order import GlobalOrder
from mae_vit.data.remote.cache import Cache, _drop
from mae_vit.data.shards.dataset_json import read_dataset
from mae_vit.runtime.locks import try_lock_descriptor

pytestmark = pytest.mark.usefixtures("impatient")


def test_a_file_gets_its_name_only_while_nobody_makes_room(source, server, tmp_path, monkeypatch):
    store, shard = open_cache(tmp_path), wanted(server, first_shard(source))
    received, receive = threading.Event(), Cache._receive

    def slowly(self, *arguments):
        receive(self, *arguments)
        received.set()

    monkeypatch.setattr(Cache, "_receive", slowly)
    thread = threading.Thread(target=store.fetch, args=(shard,))
    monkeypatch.setattr(Cache, "_make_room", lambda *_: None)
    with store._room():
        thread.start()
        assert received.wait(30)
        thread.join(0.3)
        assert thread.is_alive()
        assert not (store.folder / shard.sha256).exists()
    thread.join(30)
    assert (store.folder / shard.sha256).exists()


def test_the_least_recently_used_goes_first(source, server, tmp_path):
    shards = [wanted(server, shard) for shard in read_dataset(source).splits["train"].shards[:4]]
    cache = open_cache(tmp_path, limit=sum(shard.bytes for shard in shards[:3]) + shards[3].bytes // 2)
    for number, shard in enumerate(shards[:3]):
        os.utime(cache.fetch(shard), (1000 + number, 1000 + number))
    os.utime(cache.folder / shards[0].sha256, (2000, 2000))
    limit = cache.limit_bytes
    cache.fetch(shards[3])
    kept = [(cache.folder / shard.sha256).exists() for shard in shards]
    assert kept[0]
    assert not kept[1]
    assert kept[3]
    assert sum(path.stat().st_size for path in cache.folder.iterdir()) <= limit


def test_what_another_process_fetches_stays_on_nfs(tmp_path, monkeypatch):
    """NFS turns flock into a lock of a range, as lockf does, for which a file must be open for writing."""
    monkeypatch.setattr(fcntl, "flock", fcntl.lockf)
    part = tmp_path / "part"
    code = "import fcntl, sys; part = open(sys.argv[1], 'ab'); fcntl.lockf(part, fcntl.LOCK_EX); print(); input()"
    fetching = subprocess.Popen(
        [sys.executable, "-uc", code, str(part)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert fetching.stdout.readline()
    assert not _drop(part)
    assert part.exists()
    fetching.communicate(b"\n")
    assert _drop(part)
    assert not part.exists()


def test_only_a_file_system_without_locks_counts_as_one(tmp_path):
    with (tmp_path / "part").open("wb") as part:
        descriptor = part.fileno()
        assert try_lock_descriptor(descriptor)
    with pytest.raises(OSError, match="Bad file descriptor"):
        try_lock_descriptor(descriptor)


def test_a_cache_too_small_for_the_order_is_refused(server, tmp_path):
    folder = resolve_data_path(server.url, cache_dir=str(tmp_path / "cache"), cache_gib=6e-4)
    index = open_located(folder)
    everything = GlobalOrder(len(index), 96, 7)
    with pytest.raises(InputError, match=r'"global".*data\.cache_gib'):
        check_cache(index, open_digits(index, "tar"), everything, world_size=1, node_ranks=1)
    with pytest.raises(InputError, match=r'data\.order="blocks"'):
        check_cache(index, open_digits(index, "tar"), blocks(index), world_size=1, node_ranks=1)
