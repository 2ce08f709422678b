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
    if os.access(folder, os.W_OK):
        return f"run `mae-vit prepare --reindex {folder}`"
    links, shards = Path("data", folder.resolve().name), folder.resolve()
    if links.exists():
        links = links.with_name(f"{links.name}_links")
    return (
        f"{folder} cannot be written, so let its owner run `mae-vit prepare --reindex {folder}`, or link it: "
        f"`mkdir -p {links} && ln -s {shards}/*.tar {shards}/dataset.json {links} && "
        f"mae-vit prepare --reindex {links}`, then data.path={links}"
    )


def index_problem(path: Path, info: Split, classes: int, *, compare: bool) -> str | None:
    """Says what is wrong with an index that lies beside its shards, as a predicate; None if nothing is.

    Args:
        path: of the index.
        info: what `dataset.json` says of the split and of its index.
        classes: that there are.
        compare: with its checksum, and each row with its shard.
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
    cache = user_cache() / hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"no place for files derived from the shards: neither {beside} nor {cache} can be written "
            f"({error_reason(error)}): set XDG_CACHE_HOME"
        ) from None
    return cache
