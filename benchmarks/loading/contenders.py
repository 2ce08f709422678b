"""Who takes turns in `benchmarks/loader.py`: our path of training, and the pipelines that others use."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from benchmarks.loading import peers
from benchmarks.loading.peers import PHOTO_BATCH, SMALL_BATCH
from benchmarks.loading.rows import Row, augment_of
from mae_vit.data.batches.augmented import open_source
from mae_vit.data.batches.loader import load_batches, start_worker_server
from mae_vit.data.index import ShardIndex, open_index
from mae_vit.data.order.order import GlobalOrder, RankSlice, RepeatedOrder
from mae_vit.data.shards.samples import read_samples

Turn = Callable[[], float]  # seconds for one image
# What names of peers begin with.
PEER = "peer: "
MIB_READ = 96  # in a turn of reading


def time_batches(batches: Iterable[Any], images_of: Callable[[Any], int]) -> float:
    """Seconds for one image, from the first batch on; that one is not counted."""
    iterator = iter(batches)
    next(iterator)
    begun, images = time.perf_counter(), 0
    for batch in iterator:
        images += images_of(batch)
    return (time.perf_counter() - begun) / images


def our_images(row: Row, folder: Path) -> Turn:
    """Ours: through index, source and loader; small images need no worker."""
    start_worker_server()
    index = open_index(folder / row.ours, "train")
    source = open_source(index, "auto", channels=3, augment=augment_of(row, index), memory_limit_gib=4)
    batch_size = SMALL_BATCH if row.small else PHOTO_BATCH
    order = RepeatedOrder(GlobalOrder(len(index), batch_size // row.repeats, seed=0), row.repeats)
    workers = 0 if row.small else 1
    starts = count(step=row.batches + 1)

    def turn() -> float:
        start = next(starts)
        stop = start + row.batches + 1
        batches = load_batches(source, order, RankSlice(), start_step=start, stop_step=stop, workers=workers)
        return time_batches(batches, lambda batch: len(batch.images))

    return turn


def their_images(make: Callable[[], peers.Batches]) -> Turn:
    """A peer's."""
    batches = make()
    return lambda: time_batches(batches, len)


def our_bytes(row: Row, folder: Path) -> Turn:
    """Ours: the encoded images in the order of training."""
    index = open_index(folder / row.ours, "train")
    order, epochs = GlobalOrder(len(index), 1, seed=0), count()

    def read_all(epoch: int) -> int:
        for sample in order.samples(epoch, 0, len(index)).tolist():
            index.read(sample)
        return len(index)

    # So much faster that clocks ask for more.
    least = 8 * samples_to_read(index)
    return lambda: time_reading(partial(read_all, next(epochs)), least)


def their_bytes(row: Row, folder: Path) -> Turn:
    """Webdataset's stream over the same members, undecoded and unshuffled, its fastest."""
    index = open_index(folder / row.ours, "train")
    return partial(time_reading, lambda: sum(1 for _ in stream(folder / row.peer)), samples_to_read(index))


def stream(folder: Path) -> Iterator[dict[str, Any]]:
    """Webdataset's samples, of images alone."""
    import webdataset

    urls = sorted(str(path) for path in folder.glob("train-*.tar"))
    return iter(
        webdataset.WebDataset(urls, shardshuffle=False, select_files=lambda name: not name.endswith(".cls"))
    )


def bare_bytes(row: Row, folder: Path) -> Turn:
    """What no reader of files gets past: `os.pread` alone, of places that are known."""
    index = open_index(folder / row.ours, "train")
    paths = [folder / row.ours / shard.file for shard in index.split_info.shards]
    # Open for as long as the process lives.
    shards = [(os.open(path, os.O_RDONLY), path) for path in paths]
    walked = [
        (shard, sample.length, sample.offset) for shard, path in shards for sample in read_samples(path)
    ]
    order = GlobalOrder(len(walked), 1, seed=0)
    places = [walked[sample] for sample in order.samples(0, 0, len(walked)).tolist()]

    def read_all() -> int:
        for place in places:
            os.pread(*place)
        return len(places)

    return partial(time_reading, read_all, 8 * samples_to_read(index))


def time_reading(read_all: Callable[[], int], least: int) -> float:
    """Seconds for one image, of as many passes over all images as make `least` of them."""
    begun, read = time.perf_counter(), 0
    while read < least:
        read += read_all()
    return (time.perf_counter() - begun) / read


def samples_to_read(index: ShardIndex) -> int:
    """Of the peer's turn."""
    size = sum(shard.bytes for shard in index.split_info.shards) / len(index)
    return int(MIB_READ * 2**20 / size)


def contenders(row: Row, folder: Path) -> dict[str, Callable[[], Turn]]:
    """Who takes turns: peers draw a view for each image as ours does, and the fastest of them counts.

    Peers that decode files run with and without a worker, because either may be faster on one core.
    """
    if row.crop is None:
        return {
            "ours": partial(our_bytes, row, folder),
            f"{PEER}webdataset's stream": partial(their_bytes, row, folder),
            "limit": partial(bare_bytes, row, folder),
        }
    makers: dict[str, Callable[[], Turn]] = {"ours": partial(our_images, row, folder)}
    files = [peers.OFFICIAL, peers.PILLOW, peers.TORCHVISION]
    if not row.small:  # small images come from memory faster
        files.append(peers.PLAIN)
        files += [peers.OPENCV] * peers.is_there("cv2") + [peers.TORCHCODEC] * peers.is_there("torchcodec")
    for name in files:
        for workers in (0, 1):
            batches = partial(peers.file_batches, name, row, folder, workers)
            makers[f"{PEER}{name}, {workers} workers"] = partial(their_images, batches)
    if not row.small and peers.is_there("spdl", "torchcodec"):
        threads = partial(peers.Threads, row, folder)
        makers[f"{PEER}files, SPDL and torchcodec, uint8"] = partial(their_images, threads)
    if row.small:
        memory: dict[str, Callable[[Row, Path], peers.Batches]] = {
            f"{PEER}memory, PIL, uint8": peers.memory_pillow,
            f"{PEER}memory, torchvision v2, uint8": peers.memory_v2,
            f"{PEER}memory, batches by torch, uint8": peers.memory_batch,
            # No peer: it does less.
            "memory, torchvision v2, one box a batch": peers.memory_one_box,
        }
        for name, of_memory in memory.items():
            makers[name] = partial(their_images, partial(of_memory, row, folder))
    return makers
