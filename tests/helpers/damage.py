"""Damages shards as disks, copies and other programs do."""

from __future__ import annotations

import io
import shutil
import struct
import tarfile
import zlib
from pathlib import Path

from mae_vit.data.index import open_index

# What the list says of each way, in part.
WAYS = {
    "truncated": "truncated",
    "undecodable": "not an image",
    "zero-byte": "no bytes",
    "over the pixel bound": "exceeds limit",
    "missing member": "no image is there",
}


def copy_of(data: Path, out: Path, *, with_index: bool = False) -> Path:
    """A copy of a data folder, as if its index was never built."""
    ignored = None if with_index else shutil.ignore_patterns(".index")
    return Path(shutil.copytree(data, out, ignore=ignored))


def keys_of(data: Path, split: str = "train") -> list[str]:
    return open_index(data, split).keys()


def damage(whole: Path, copy: Path, ways: dict[int, str]) -> dict[int, tuple[str, str]]:
    """Damages samples of a copy; returns shard and key of each."""
    index, keys = open_index(whole, "train"), keys_of(whole)
    places = {n: (index.split_info.shards[int(index._rows["shard"][n])].file, keys[n]) for n in ways}
    for file in sorted({file for file, _ in places.values()}):
        _rewrite(copy / file, {places[n][1]: ways[n] for n in ways if places[n][0] == file})
    return places


def _rewrite(path: Path, ways: dict[str, str]) -> None:
    with tarfile.open(path) as tar:
        members = [(member, tar.extractfile(member).read()) for member in tar.getmembers()]
    with tarfile.open(path, "w") as tar:
        for member, data in members:
            key, _, extension = member.name.partition(".")
            way = ways.get(key) if extension == "png" else None
            if way == "missing member":
                continue
            if way is not None:
                data = _damaged(data, way)
                member.size = len(data)
            tar.addfile(member, io.BytesIO(data))


def _damaged(image: bytes, way: str) -> bytes:
    return {
        "truncated": image[: len(image) * 2 // 3],
        "undecodable": bytes(len(image)),
        "zero-byte": b"",
        "over the pixel bound": bomb_png(60_000, 60_000),
    }[way]


def bomb_png(width: int, height: int) -> bytes:
    """A PNG whose header promises width x height pixels, all zero: 1,000 times smaller than they."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    rows = zlib.compress(bytes(1 << 20))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")
