"""A remote data folder and the local folder that stands in for it.

The local folder holds `dataset.json`, fetched at each start, the index, and files derived from it. Shards are fetched
into a cache beside it when they are read.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import shutil
import sys
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from filelock import FileLock

from mae_vit.core.errors import FetchUnavailable, InputError
from mae_vit.core.files import replacing, user_cache
from mae_vit.core.messages import error_reason
from mae_vit.core.urls import check_url, file_url, redact_url
from mae_vit.data.remote.cache import Cache, RemoteFile, RemoteFolder
from mae_vit.data.remote.download import FetchRefused, download
from mae_vit.data.shards.dataset_json import FILE_NAME, Dataset, IndexFile, parse_dataset, read_dataset

DEFAULT_CACHE_GIB = 50.0
# A name that only we use, because files in the folder may be removed.
_SHARDS = "mae-vit-shards"
# Short, because a user waits at the start.
START_PATIENCE_S = 30.0


class DataLocation(NamedTuple):
    """A local folder with `dataset.json`, and the remote folder that it stands in for, if it lacks the shards."""

    folder: Path
    remote: RemoteFolder | None = None


def open_remote(
    path: str, *, cache_dir: str | None = None, cache_gib: float | None = None, say: bool = False
) -> DataLocation:
    """Returns the local folder that stands in for a URL, after fetching `dataset.json`; see `resolve_data_path`.

    Raises:
        InputError: if it cannot be opened.
    """
    check_url(path)
    root = (Path(cache_dir) if cache_dir else user_cache()).resolve()
    limit = int((DEFAULT_CACHE_GIB if cache_gib is None else cache_gib) * 2**30)
    remote, shown = RemoteFolder(path, root / _SHARDS, limit), redact_url(path)
    # A name that users recognize and that is unique to the URL.
    words = re.sub(r"[^A-Za-z0-9.]+", "-", shown).strip("-.")[-60:]
    folder = root / "mae-vit-remote" / f"{words}-{hashlib.sha256(path.encode()).hexdigest()[:12]}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        remote.cache_folder.mkdir(exist_ok=True)
        # All processes of a node come here at once, and later fetch shards under locks of the system.
        with FileLock(folder / ".lock", fallback_to_soft=False):
            dataset = _fetch_description(remote, folder, say)
    except OSError as error:
        reason = error_reason(error)
        raise InputError(
            f"shards of {shown} need a cache, but {root} cannot be written or locked ({reason}); give another "
            "data.cache_dir"
        ) from None
    sizes = [shard.bytes for split in dataset.splits.values() for shard in split.shards]
    if max(sizes) > limit:
        raise InputError(
            f"a shard of {shown} has {_gib(max(sizes))} GiB, but the cache only {_gib(limit)}; raise data.cache_gib"
        )
    if say:
        total = f"{_gib(sum(sizes))} GiB"
        print(f"shards of {shown} ({total}) go to {remote.cache_folder} (at most {_gib(limit)} GiB)")
    return DataLocation(folder, remote)


def fetch_index(remote: RemoteFolder, described: IndexFile, path: Path) -> None:
    """Fetches the index of a split; raises InputError if it cannot be fetched."""
    cache = Cache(path.parent, sys.maxsize, patience_s=START_PATIENCE_S)
    try:
        url = file_url(remote.url, described.file)
        os.replace(cache.fetch(RemoteFile(url, described.bytes, described.sha256)), path)
    except (FetchRefused, FetchUnavailable) as error:
        raise InputError(
            f"index {described.file} of {redact_url(remote.url)} cannot be fetched ({error}); put it next to the "
            "shards, where it was written"
        ) from None


def check_room(remote: RemoteFolder, needed: int, why: str) -> None:
    """Checks that the cache and its disk take `needed` bytes at once; `why` says for what.

    Raises:
        InputError: if not; names the size needed.
    """
    needs = f"{why} needs {_gib(needed)} GiB of shards of {redact_url(remote.url)} at once, but the"
    if needed > remote.cache_bytes:
        raise InputError(
            f"{needs} cache has only {_gib(remote.cache_bytes)}; raise data.cache_gib, or use data.order=blocks "
            "with fewer data.lanes or data.block_shards"
        )
    room = shutil.disk_usage(remote.cache_folder).free
    for entry in os.scandir(remote.cache_folder):
        with suppress(FileNotFoundError):
            room += entry.stat().st_size
    if needed > room:
        raise InputError(
            f"{needs} disk of {remote.cache_folder} has only {_gib(room)} free; give data.cache_dir on another"
        )


def _gib(size: int) -> str:
    return f"{size / 2**30:.3g}"


def _fetch_description(remote: RemoteFolder, folder: Path, say: bool) -> Dataset:
    """Fetches `dataset.json`; uses the one from an earlier start if the source does not answer."""
    path, stream, shown = folder / FILE_NAME, io.BytesIO(), redact_url(remote.url)
    try:
        download(file_url(remote.url, FILE_NAME), stream, patience_s=START_PATIENCE_S)
    except FetchRefused as error:
        raise InputError(
            f"data folder {shown} cannot be read ({FILE_NAME}: {error}); give a folder that `mae-vit prepare` "
            "wrote, with all its files"
        ) from None
    except FetchUnavailable as error:
        if not path.exists():
            raise InputError(f"{error}: data.path={shown}") from None
        if say:
            print(f"warning: {error}; using its {FILE_NAME} from an earlier run", file=sys.stderr)
        return read_dataset(folder)
    # Parse first: an invalid file must not replace a valid one.
    dataset = parse_dataset(stream.getvalue(), f"{FILE_NAME} of {shown}")
    with replacing(path) as partial:
        partial.write_bytes(stream.getvalue())
    return dataset
