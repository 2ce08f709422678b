"""A data folder elsewhere, and the folder that stands in for it here.

That holds `dataset.json`, fetched at each start, the index, and what is derived from it. The
shards come into a cache beside it when they are read.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from filelock import FileLock

from mae_vit.core.errors import FetchUnavailable, InputError
from mae_vit.core.files import replacing, user_cache
from mae_vit.core.messages import error_reason
from mae_vit.core.urls import check_url, file_url, redact_url
from mae_vit.data.remote.cache import STALL_S, Cache, RemoteFile
from mae_vit.data.remote.retry import RetryTimer
from mae_vit.data.remote.streams import FetchRefused, open_stream
from mae_vit.data.shards.dataset_json import FILE_NAME, Dataset, IndexFile, Shard, parse_dataset, read_dataset

DEFAULT_CACHE_GIB = 50.0
# A name of our own: what lies in it may be removed.
_SHARDS = "mae-vit-shards"
# A description of a million shards has 150 MB.
_LARGEST_DESCRIPTION = 1 << 30
# At the start a person waits.
START_PATIENCE_S = 30.0
_LONGEST_DESCRIBING_S = 300.0


@dataclass(frozen=True)
class RemoteFolder:
    """A data folder elsewhere.

    Attributes:
        url: of the folder.
        cache_folder: where its shards go.
        cache_bytes: what all shards there may take.
    """

    url: str
    cache_folder: Path
    cache_bytes: int

    @property
    def cache(self) -> Cache:
        """Where shards go."""
        return Cache(self.cache_folder, self.cache_bytes)

    def wanted(self, file: Shard | IndexFile) -> RemoteFile:
        """Says how to fetch a file of the folder."""
        return RemoteFile(file_url(self.url, file.file), file.bytes, file.sha256)


class DataLocation(NamedTuple):
    """A data folder here.

    Attributes:
        folder: that holds `dataset.json`.
        remote: what it stands in for; None if it holds its shards itself.
    """

    folder: Path
    remote: RemoteFolder | None = None


def open_remote(
    path: str, *, cache_dir: str | None = None, cache_gib: float | None = None, say: bool = False
) -> DataLocation:
    """Returns the folder that stands in for a URL, its description fetched.

    Args:
        path: the URL.
        cache_dir: where what is fetched goes; None for the user's cache folder.
        cache_gib: what shards may take there; None for 50.
        say: whether this process says where they go, one of each node.

    Raises:
        InputError: if it cannot be opened.
    """
    check_url(path)
    root = (Path(cache_dir) if cache_dir else user_cache()).resolve()
    limit = int((DEFAULT_CACHE_GIB if cache_gib is None else cache_gib) * 2**30)
    remote = RemoteFolder(path, root / _SHARDS, limit)
    folder = root / "mae-vit-remote" / _name_of(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        remote.cache_folder.mkdir(exist_ok=True)
        # All processes of a node come here at once.
        with FileLock(folder / ".lock"):
            dataset = _describe(remote, folder, say)
    except OSError as error:
        reason = error_reason(error)
        raise InputError(
            f"no place for shards of {redact_url(path)}: {root} cannot be written ({reason}): give data.cache_dir"
        ) from None
    shards = [shard for split in dataset.splits.values() for shard in split.shards]
    for shard in shards:
        file_url(path, shard.file)
    largest = max(shard.bytes for shard in shards)
    if largest > limit:
        raise InputError(
            f"a shard of {redact_url(path)} has {largest / 2**30:.3g} GiB, the cache takes {limit / 2**30:.3g}: raise "
            "data.cache_gib"
        )
    if say:
        gib = sum(shard.bytes for shard in shards) / 2**30
        print(
            f"shards of {redact_url(path)} ({gib:.3g} GiB) go to {remote.cache_folder} "
            f"(at most {limit / 2**30:.3g} GiB)"
        )
    return DataLocation(folder, remote)


def fetch_index(remote: RemoteFolder, described: IndexFile, path: Path) -> None:
    """Fetches the index of a split.

    Raises:
        InputError: if it cannot be had.
    """
    own = Cache(path.parent, sys.maxsize, patience_s=START_PATIENCE_S)
    try:
        os.replace(own.fetch(remote.wanted(described)), path)
    except (FetchRefused, FetchUnavailable) as error:
        raise InputError(
            f"index {described.file} of {redact_url(remote.url)} cannot be had: {error}: it was written beside the "
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
            f"{why} needs {gib:.3g} GiB of shards of {redact_url(remote.url)} at hand, the cache takes "
            f"{remote.cache_bytes / 2**30:.3g}: raise data.cache_gib, or use data.order=blocks with fewer data.lanes "
            "or data.block_shards"
        )
    held = 0
    for entry in os.scandir(remote.cache_folder):
        with suppress(FileNotFoundError):
            held += entry.stat().st_size
    free = shutil.disk_usage(remote.cache_folder).free + held
    if needed > free:
        raise InputError(
            f"{why} needs {gib:.3g} GiB of shards of {redact_url(remote.url)} at hand, the disk of "
            f"{remote.cache_folder} has room for {free / 2**30:.3g}: give data.cache_dir on another"
        )


def _describe(remote: RemoteFolder, folder: Path, say: bool) -> Dataset:
    """Fetches `dataset.json`; one from an earlier start does where the source is silent."""
    path = folder / FILE_NAME
    try:
        data = _fetch_description(file_url(remote.url, FILE_NAME))
    except FetchRefused as error:
        raise InputError(
            f"data folder {redact_url(remote.url)} cannot be read: {FILE_NAME}: {error}: it is a folder that "
            "`mae-vit prepare` has written, with all its files"
        ) from None
    except FetchUnavailable as error:
        if not path.exists():
            raise InputError(f"{error}: data.path={redact_url(remote.url)}") from None
        if say:
            print(f"warning: {error}; using its {FILE_NAME} of an earlier start", file=sys.stderr)
        return read_dataset(folder)
    # What is none must not take the place of what was one.
    dataset = parse_dataset(data, f"{FILE_NAME} of {redact_url(remote.url)}")
    with replacing(path) as partial:
        partial.write_bytes(data)
    return dataset


def _fetch_description(url: str) -> bytes:
    """Fetches a small file.

    Raises:
        FetchRefused: if the source does not have it.
        FetchUnavailable: if it does not come.
    """
    patience = RetryTimer(START_PATIENCE_S, f"{redact_url(url)} cannot be fetched")
    until = time.monotonic() + _LONGEST_DESCRIBING_S
    while True:
        data = bytearray()
        try:
            with open_stream(url, 0, stall_s=STALL_S) as stream:
                while block := stream.read():
                    data.extend(block)
                    if len(data) > _LARGEST_DESCRIPTION:
                        raise FetchRefused("it has over 1 GiB")
                    if time.monotonic() > until:
                        raise FetchRefused(f"it does not come to an end in {_LONGEST_DESCRIBING_S:.0f} s")
            return bytes(data)
        except OSError as error:
            patience.wait(error_reason(error))


def _name_of(url: str) -> str:
    """A folder name that people recognize, and no other URL has."""
    words = re.sub(r"[^A-Za-z0-9.]+", "-", redact_url(url)).strip("-.")[-60:]
    return f"{words}-{hashlib.sha256(url.encode()).hexdigest()[:12]}"
