"""From `data.path` to a folder of shards here: itself, a copy prepared from images, or what stands in for a URL."""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from collections import Counter
from fractions import Fraction
from pathlib import Path

from filelock import FileLock

from mae_vit.core import __version__
from mae_vit.core.errors import InputError
from mae_vit.core.files import user_cache
from mae_vit.core.messages import error_reason
from mae_vit.core.urls import is_url, redact_url
from mae_vit.data.prepare.convert_pool import default_workers
from mae_vit.data.prepare.prepare import prepare
from mae_vit.data.prepare.selection import HOLDOUT_SPLIT, MEASURED, Selection
from mae_vit.data.prepare.sources.find import find_images
from mae_vit.data.prepare.sources.folders import walk
from mae_vit.data.remote.folder import DataLocation, open_remote
from mae_vit.data.shards.dataset_json import FILE_NAME

# Copies of other states of the same source, not used for so long, are removed.
_UNUSED_S = 7 * 24 * 3600
_HOLDOUT = Fraction(1, 10)


def resolve_data_path(
    path: str, *, cache_dir: str | None = None, cache_gib: float | None = None, say: bool = False
) -> DataLocation:
    """Returns the data folder of a path.

    A folder of shards is itself. Images that nobody prepared (a folder, an archive) are prepared once, into
    the cache folder, as `mae-vit prepare` does by default; a tenth of them is held out as "val" where they
    bring no split to measure on. For a URL it is the folder that stands in for it, its description fetched.

    Args:
        path: `data.path`.
        cache_dir: where what is prepared or fetched goes; None for the user's cache folder.
        cache_gib: what fetched shards may take there; None for 50.
        say: whether this process says where what is fetched goes, one of each node.

    Raises:
        InputError: if a URL cannot be opened, or images cannot be prepared.
    """
    if is_url(path):
        return open_remote(path, cache_dir=cache_dir, cache_gib=cache_gib, say=say)
    source = Path(path)
    if is_unprepared(source):
        return DataLocation(_prepared(source, Path(cache_dir) if cache_dir else user_cache()))
    if cache_dir is not None:
        raise InputError(f"data.cache_dir has no effect: {path} holds shards, which are used where they lie")
    return DataLocation(source)


def describe_place(path: str, folder: Path) -> str:
    """Names a data path for people, and where its images are prepared."""
    prepared = not is_url(path) and folder != Path(path)
    return f"{path} (prepared in {folder})" if prepared else redact_url(path)


def is_unprepared(source: Path) -> bool:
    """Whether a path is of images that are to be prepared: shards are used where they lie, once described."""
    if source.is_dir():
        return not (source / FILE_NAME).exists() and any(source.iterdir()) and not any(source.glob("*.tar"))
    return source.is_file()


def _prepared(source: Path, cache: Path) -> Path:
    """Returns the folder that a source is prepared in; prepares it if it is not there, or was of other files."""
    digest, total = _state_of(source)
    name = hashlib.sha256(str(source.resolve()).encode("utf-8", "surrogateescape")).hexdigest()[:8]
    home = cache.resolve() / "mae-vit-prepared" / f"{source.resolve().name}-{name}"
    out = home / digest[:12]
    try:
        home.mkdir(parents=True, exist_ok=True)
        # All processes of a node come here at once: one prepares, the others wait.
        with FileLock(home / ".lock"):
            if not (out / FILE_NAME).exists():
                _prepare(source, out, total)
            os.utime(out)
            _drop_unused(home)
    except OSError as error:
        raise InputError(
            f"data.path={source} is prepared in {error.filename or home}, which cannot be written "
            f"({error_reason(error)}): give data.cache_dir, or run `mae-vit prepare {source} OUT`"
        ) from None
    return out


def _prepare(source: Path, out: Path, total: int) -> None:
    if total > (free := shutil.disk_usage(out.parent).free):
        raise InputError(
            f"data.path={source} has {total / 2**30:.3g} GiB of images to be prepared in {out.parent}, which has room "
            f"for {free / 2**30:.3g}: give data.cache_dir, or run `mae-vit prepare {source} OUT` and data.path=OUT"
        )
    images = find_images(str(source), out=out)
    classes = Counter(entry.class_name for entry in images.entries)
    # Of fewer images a tenth is none.
    alone = not any(entry.split in MEASURED for entry in images.entries) and max(classes.values()) >= 5
    held = f", a tenth held out as {HOLDOUT_SPLIT}" if alone else ""
    print(
        f"data.path={source} is not prepared: its images are written as shards to {out}, once{held}",
        flush=True,
    )
    try:
        report = prepare(
            [images],
            out,
            selection=Selection(holdout=_HOLDOUT if alone else None),
            workers=default_workers(),
        )
    except InputError:
        images.discard()
        shutil.rmtree(out, ignore_errors=True)
        raise
    print("\n".join(report.lines()), flush=True)


def _state_of(source: Path) -> tuple[str, int]:
    """Returns what changes when a file of a source does, and the bytes of all of them."""
    files = sorted(walk(source)) if source.is_dir() else [source]
    digest, total = hashlib.sha256(__version__.encode()), 0
    for file in files:
        try:
            status = file.stat()
        except OSError:  # a dead link, of which `prepare` says what it is
            continue
        total += status.st_size
        line = f"{file.relative_to(source)} {status.st_size} {status.st_mtime_ns}\n"
        digest.update(line.encode("utf-8", "surrogateescape"))
    return digest.hexdigest(), total


def _drop_unused(home: Path) -> None:
    for folder in home.iterdir():
        if folder.is_dir() and time.time() - folder.stat().st_mtime > _UNUSED_S:
            shutil.rmtree(folder, ignore_errors=True)
