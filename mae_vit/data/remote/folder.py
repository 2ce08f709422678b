"""A data folder elsewhere, and the folder that stands in for it here.

That holds `dataset.json`, fetched at each start, the index, and what is derived from it. The
shards come into a cache beside it when they are read.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from mae_vit.data.dataset import FILE_NAME, Dataset, IndexFile, Shard, read_dataset
from mae_vit.data.remote.cache import STALL_S, Cache, Wanted, keep_trying
from mae_vit.data.remote.streams import Refused, open_stream
from mae_vit.data.remote.urls import check_url, file_url, is_url, shown
from mae_vit.errors import InputError, Unreachable
from mae_vit.locks import locked

DEFAULT_CACHE_GIB = 50.0
_NOTE = "remote.json"
_SHARDS = "shards"
# A description of a million shards has 150 MB.
_LARGEST_DESCRIPTION = 1 << 30
# At the start a person waits.
_START_PATIENCE_S = 30.0


@dataclass(frozen=True)
class RemoteFolder:
    """A data folder elsewhere.

    Attributes:
        url: of the folder.
        cache_dir: where its shards go.
        cache_bytes: what all shards there may take.
    """

    url: str
    cache_dir: str
    cache_bytes: int

    @property
    def cache(self) -> Cache:
        """Where shards go."""
        return Cache(Path(self.cache_dir) / _SHARDS, self.cache_bytes)

    def wanted(self, file: Shard | IndexFile) -> Wanted:
        """Says how to fetch a file of the folder."""
        return Wanted(file_url(self.url, file.file), file.bytes, file.sha256)


def find_remote(folder: Path) -> RemoteFolder | None:
    """Returns what a folder stands in for; None if it holds its shards itself.

    Raises:
        InputError: if the note of it is damaged.
    """
    try:
        return RemoteFolder(**json.loads((folder / _NOTE).read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        raise InputError(f"{folder / _NOTE} is damaged ({error}): remove {folder}") from None


def locate(
    path: str, *, cache_dir: str | None = None, cache_gib: float | None = None, say: bool = False
) -> Path:
    """Returns the data folder of a path: itself, or what stands in for a URL, its description fetched.

    Args:
        path: `data.path`.
        cache_dir: where what is fetched goes; None for the user's cache folder.
        cache_gib: what shards may take there; None for 50.
        say: whether this process says where they go.

    Raises:
        InputError: if a URL cannot be opened.
    """
    if not is_url(path):
        return Path(path)
    check_url(path)
    root = Path(cache_dir) if cache_dir else _user_cache()
    limit = int((DEFAULT_CACHE_GIB if cache_gib is None else cache_gib) * 2**30)
    remote = RemoteFolder(path, str(root.resolve()), limit)
    folder = root / "remote" / _name_of(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (root / _SHARDS).mkdir(exist_ok=True)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise InputError(
            f"no place for shards of {shown(path)}: {root} cannot be written ({reason}): give data.cache_dir"
        ) from None
    # All processes of a node come here at once.
    with locked(folder / ".lock"):
        dataset = _describe(remote, folder, say)
        _write(folder / _NOTE, json.dumps(asdict(remote)).encode())
    if say:
        gib = sum(shard.bytes for split in dataset.splits.values() for shard in split.shards) / 2**30
        print(
            f"shards of {shown(path)} ({gib:.3g} GiB) go to {root / _SHARDS} (at most {limit / 2**30:.3g} GiB)"
        )
    return folder


def fetch_index(remote: RemoteFolder, described: IndexFile, path: Path) -> None:
    """Fetches the index of a split.

    Raises:
        InputError: if it cannot be had.
    """
    own = Cache(path.parent, sys.maxsize)
    try:
        os.replace(own.fetch(remote.wanted(described), patience_s=_START_PATIENCE_S), path)
    except (Refused, Unreachable) as error:
        raise InputError(
            f"index {described.file} of {shown(remote.url)} cannot be had: {error}: it was written beside the "
            "shards, put it there"
        ) from None


def check_room(remote: RemoteFolder, needed: int, why: str) -> None:
    """Refuses a cache, or a disk, that is too small.

    Args:
        remote: the folder.
        needed: bytes that must lie in the cache at a time.
        why: what needs them.

    Raises:
        InputError: naming what is needed.
    """
    gib = needed / 2**30
    if needed > remote.cache_bytes:
        raise InputError(
            f"{why} needs {gib:.3g} GiB of shards of {shown(remote.url)} at hand, the cache takes "
            f"{remote.cache_bytes / 2**30:.3g}: raise data.cache_gib, or use data.order=blocks with fewer data.lanes "
            "or data.block_shards"
        )
    folder = Path(remote.cache_dir) / _SHARDS
    held = sum(entry.stat().st_size for entry in os.scandir(folder) if entry.is_file())
    free = shutil.disk_usage(folder).free + held
    if needed > free:
        raise InputError(
            f"{why} needs {gib:.3g} GiB of shards of {shown(remote.url)} at hand, the disk of {folder} has room for "
            f"{free / 2**30:.3g}: give data.cache_dir on another"
        )


def _describe(remote: RemoteFolder, folder: Path, say: bool) -> Dataset:
    """Fetches `dataset.json`; one from an earlier start does where the source is silent."""
    url, path = file_url(remote.url, FILE_NAME), folder / FILE_NAME
    data = bytearray()

    def fetch() -> None:
        data.clear()
        with open_stream(url, 0, stall_s=STALL_S) as stream:
            while block := stream.read():
                data.extend(block)
                if len(data) > _LARGEST_DESCRIPTION:
                    raise Refused("it has over 1 GiB")

    try:
        keep_trying(fetch, url, _START_PATIENCE_S)
    except Refused as error:
        raise InputError(
            f"data folder {shown(remote.url)} cannot be read: {FILE_NAME}: {error}: it is a folder that "
            "`mae-vit prepare` has written, with all its files"
        ) from None
    except Unreachable as error:
        if not path.exists():
            raise InputError(f"{error}: data.path={shown(remote.url)}") from None
        if say:
            print(f"warning: {error}; going on with its {FILE_NAME} of an earlier start", file=sys.stderr)
    else:
        _write(path, bytes(data))
    return read_dataset(folder)


def _write(path: Path, data: bytes) -> None:
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_bytes(data)
    os.replace(partial, path)


def _name_of(url: str) -> str:
    """A folder name that people recognize, and no other URL has."""
    words = re.sub(r"[^A-Za-z0-9.]+", "-", shown(url)).strip("-.")[-60:]
    return f"{words}-{hashlib.sha256(url.encode()).hexdigest()[:12]}"


def _user_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mae-vit"
