"""The files of an index: the array beside the shards, and the folder of what is derived from them."""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from pathlib import Path

from mae_vit.core.errors import InputError
from mae_vit.core.files import user_cache
from mae_vit.core.messages import error_reason
from mae_vit.data.shards.dataset_json import Split, file_digest
from mae_vit.data.shards.index_rows import load_rows, rows_fit


def reindex_hint(folder: Path) -> str:
    """Says how a folder gets its index."""
    owner = "" if os.access(folder, os.W_OK) else ", or let its owner run it: you cannot write there"
    return f"run `mae-vit prepare --reindex {folder}`{owner}"


def index_problem(path: Path, info: Split, classes: int, *, compare: bool) -> str | None:
    """Says what is wrong with an index that lies beside its shards, as a predicate; None if nothing is.

    Args:
        path: file of the index.
        info: what `dataset.json` says of the split and of its index.
        classes: that there are.
        compare: whether to compare its checksum, and each row with its shard.
    """
    assert info.index is not None
    try:
        size = path.stat().st_size
    except OSError as error:
        return f"cannot be read: {error_reason(error)}"
    if size != info.index.bytes:
        return f"has {size} bytes, dataset.json says {info.index.bytes}"
    rows = load_rows(path, info.samples)
    if rows is None:
        return f"does not hold {info.samples:,} samples"
    if compare and file_digest(path) != info.index.sha256:
        return "is another one than dataset.json describes: its checksum differs"
    return None if not compare or rows_fit(rows, info.shards, classes) else "is not that of its shards"


def stored_keys(path: Path, count: int) -> list[str] | None:
    """Reads the keys that are stored beside an index; None unless there are `count` of them."""
    with suppress(OSError, ValueError):
        keys = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(keys, list) and len(keys) == count:
            return keys
    return None


def cache_folder(folder: Path) -> Path:
    """Returns `.index/` beside the shards, or a folder of the user's cache where that cannot be written."""
    beside = folder / ".index"
    try:
        beside.mkdir(exist_ok=True)
        if os.access(beside, os.W_OK):
            return beside
    except OSError:
        pass
    cache = _users_cache(folder)
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"no place for files derived from the shards: neither {beside} nor {cache} can be written "
            f"({error_reason(error)}): set XDG_CACHE_HOME"
        ) from None
    return cache


def decoded_files(folder: Path, split: str, info: Split) -> list[Path]:
    """Returns the files of decoded images that runs keep of a split, as it is described."""
    name = f"{split}-{fingerprint_of(info)[:16]}-*[0-9].npy"
    return sorted(found for place in (folder / ".index", _users_cache(folder)) for found in place.glob(name))


def _users_cache(folder: Path) -> Path:
    return user_cache() / hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]


def fingerprint_of(info: Split) -> str:
    """Returns what changes when any shard of a split does."""
    text = "\n".join(f"{shard.file} {shard.samples} {shard.bytes} {shard.sha256}" for shard in info.shards)
    return hashlib.sha256(text.encode()).hexdigest()
