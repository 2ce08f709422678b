"""A remote data folder and the local folder that stands in for it.

The local folder holds `dataset.json`, fetched at each start, the index, and files derived from it. Shards are fetched
into a cache beside it when they are read.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import sys
from pathlib import Path
from typing import NamedTuple

from filelock import FileLock

from mae_vit.core.errors import FetchUnavailable, InputError
from mae_vit.core.files import replacing, user_cache
from mae_vit.core.messages import error_reason
from mae_vit.core.urls import check_url, file_url, redact_url
from mae_vit.data.remote.cache import Cache, RemoteFile, RemoteFolder
from mae_vit.data.remote.download import FetchRefused, download
from mae_vit.data.shards import index_files
from mae_vit.data.shards.dataset_json import FILE_NAME, Dataset, parse_dataset, read_dataset

DEFAULT_CACHE_GIB = 50.0
# A name that only we use, because files in the folder may be removed.
_SHARDS = "mae-vit-shards"
_NPY_HEADER = 4096  # at most
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
            f"a shard of {shown} has {gib(max(sizes))} GiB, but the cache only {gib(limit)}; raise data.cache_gib"
        )
    if say:
        total = f"{gib(sum(sizes))} GiB"
        print(f"shards of {shown} ({total}) go to {remote.cache_folder} (at most {gib(limit)} GiB)")
    return DataLocation(folder, remote)


def fetch_index(remote: RemoteFolder, folder: Path, split: str, dataset: Dataset) -> Path:
    """Returns the index of a remote split, whose `folder` is local; it is fetched and checked once.

    Raises:
        InputError: if it cannot be fetched, or does not match the shards.
    """
    info = dataset.splits[split]
    assert info.index is not None
    where = f"index {info.index.file} of {redact_url(remote.url)}"
    if info.index.bytes > info.samples * index_files.ROW.itemsize + _NPY_HEADER:
        raise InputError(
            f"{where} has {info.index.bytes:,} bytes, too many for {info.samples:,} images; prepare the data again"
        )
    home = index_files.cache_folder(folder)
    path = home / f"{split}-index-{info.index.sha256[:16]}.npy"
    file = RemoteFile(file_url(remote.url, info.index.file), info.index.bytes, info.index.sha256)
    # All ranks of a node come here at once: one fetches, the others wait.
    with FileLock(home / f".{split}.lock"):
        if index_files.load_rows(path, info.samples) is None:
            try:
                os.replace(Cache(home, sys.maxsize, patience_s=START_PATIENCE_S).fetch(file), path)
            except (FetchRefused, FetchUnavailable) as error:
                raise InputError(
                    f"{where} cannot be fetched ({error}); put it next to the shards, where it was written"
                ) from None
            if index_files.index_problem(path, info, len(dataset.classes), compare=True) is not None:
                path.unlink()
                raise InputError(f"{where} does not match its shards; prepare the data again")
            for stale in home.glob(f"{split}-index-*.npy"):
                if stale != path:
                    stale.unlink(missing_ok=True)
    return path


def gib(size: int) -> str:
    """Formats a size in GiB."""
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
