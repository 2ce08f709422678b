"""Damages shards as disks, copies and other programs do."""

from __future__ import annotations

import json
import shutil
import struct
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mae_vit.data.index import open_index
from mae_vit.data.shards.tar_headers import BLOCK

# What the list says of each way, in part.
WAYS = {
    "cut off": "do not match their checksum",
    "undecodable": "not an image",
    "another sample": "the shard contains another sample there",
    "over the pixel bound": "exceeds limit",
    "flipped bit": "do not match their checksum",
}


def copy_of(data: Path, out: Path) -> Path:
    """A copy of a data folder, of which no run has derived anything."""
    return Path(shutil.copytree(data, out, ignore=shutil.ignore_patterns(".index")))


@contextmanager
def description(data: Path) -> Iterator[dict]:
    """What dataset.json holds; changes of it are written."""
    path = data / "dataset.json"
    described = json.loads(path.read_text())
    yield described
    path.write_text(json.dumps(described))


def keys_of(data: Path) -> list[str]:
    return open_index(data, "train").keys()


def known_key(key: str, way: str) -> str | None:
    """What a damaged sample can still be called: its header has its key."""
    return None if way == "another sample" else key


def damage(whole: Path, copy: Path, ways: dict[int, str]) -> None:
    """Damages samples of a copy where they lie."""
    index = open_index(whole, "train")
    for sample, way in ways.items():
        offset, length = int(index._rows["offset"][sample]), int(index._rows["length"][sample])
        with open(copy / index.shard_of(sample), "r+b") as file:
            file.seek(offset - BLOCK)
            member = file.read(BLOCK + length)
            file.seek(offset - BLOCK)
            file.write(_damaged(member[:BLOCK], member[BLOCK:], way))


def _damaged(header: bytes, image: bytes, way: str) -> bytes:
    """A member of the same size."""
    if way == "another sample":
        info = tarfile.TarInfo.frombuf(header, "utf-8", "surrogateescape")
        info.name = f"other/{info.name}"
        return info.tobuf(tarfile.USTAR_FORMAT) + image
    half = len(image) // 2
    return (
        header
        + {
            "cut off": image[:half] + bytes(len(image) - half),
            "undecodable": bytes(len(image)),
            "over the pixel bound": bomb_png(60_000, 60_000)[:33] + image[33:],
            "flipped bit": image[:half] + bytes([image[half] ^ 1]) + image[half + 1 :],
        }[way]
    )


def bomb_png(width: int, height: int) -> bytes:
    """A PNG whose header promises width x height pixels, all zero: 1,000 times smaller than they."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    rows = zlib.compress(bytes(1 << 20))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")
