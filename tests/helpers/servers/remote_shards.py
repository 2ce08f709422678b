"""What tests of shards elsewhere ask for, and what their processes do: without torch, they start sooner."""

from pathlib import Path

from mae_vit.core.urls import file_url
from mae_vit.data.remote.cache import Cache, RemoteFile
from mae_vit.data.shards.dataset_json import Shard, read_dataset

STEPS = range(0, 12)


def blocks(index, seed=7):
    from mae_vit.data.order.order import BlockOrder  # and with it torch

    counts = [shard.samples for shard in index.split_info.shards]
    return BlockOrder(counts, effective_batch_size=96, seed=seed, lanes=8, block_shards=2)


def first_shard(source) -> Shard:
    return read_dataset(source).splits["train"].shards[0]


def wanted(server, shard) -> RemoteFile:
    return RemoteFile(file_url(server.url, shard.file), shard.bytes, shard.sha256)


def open_cache(tmp_path, limit=1 << 30, **options) -> Cache:
    folder = tmp_path / "cache"
    folder.mkdir(exist_ok=True)
    return Cache(folder, limit, **{"patience_s": 2.0, **options})


def fetch_all(url, source, folder, limit, started):
    started.wait()
    store = Cache(Path(folder), limit)
    for shard in read_dataset(Path(source)).splits["train"].shards:
        store.fetch(RemoteFile(file_url(url, shard.file), shard.bytes, shard.sha256))
