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
from mae_vit.core.user_files import is_hidden
from mae_vit.data.prepare.convert_pool import default_workers
from mae_vit.data.prepare.prepare import prepare
from mae_vit.data.prepare.selection import HOLDOUT_SPLIT, MEASURED, Selection
from mae_vit.data.prepare.sources.find import find_images
from mae_vit.data.prepare.sources.folders import walk
from mae_vit.data.prepare.sources.tables import is_table, read_table
from mae_vit.data.remote.folder import DataLocation, open_remote
from mae_vit.data.shards.dataset_json import FILE_NAME, SOURCES

# Copies of other states of the same source are removed when no run began with them for so long: one may still read.
_UNUSED_S = 30 * 24 * 3600
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
    if path in SOURCES:
        return DataLocation(Path(path))
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


def check_recorded(path: str, run: Path, remedy: str) -> None:
    """Makes sure that the data of a run lie where its config says, which may be elsewhere or another machine.

    Args:
        path: the `data.path` that the run recorded. A relative one is seen from the working folder, not from the run's.
        run: its folder.
        remedy: the end of a line, which takes the path that is probably meant in place of DIR.

    Raises:
        InputError: if there is nothing at the path.
    """
    if is_url(path) or path in SOURCES or os.path.exists(path):
        return
    around = (parent / path for parent in run.absolute().parents)
    near = next((place for place in around if place.exists()), None)
    seen = "" if os.path.isabs(path) else f" from {Path.cwd()}"
    raise InputError(
        f"{run} recorded data.path={path}, which does not exist{seen}: {remedy.replace('DIR', str(near or 'DIR'))}"
    )


def is_unprepared(source: Path) -> bool:
    """Whether a path is of images that are to be prepared: shards are used where they lie, once described."""
    if source.is_dir():
        return not (source / FILE_NAME).exists() and any(source.iterdir()) and not any(source.glob("*.tar"))
    # One of several shards is not the data.
    return source.is_file() and not (source.parent / FILE_NAME).exists()


def _prepared(source: Path, cache: Path) -> Path:
    """Returns the folder that a source is prepared in; prepares it if it is not there, or was of other files."""
    real = source.resolve()
    name = hashlib.sha256(str(real).encode("utf-8", "surrogateescape")).hexdigest()[:8]
    home = cache.resolve() / "mae-vit-prepared" / f"{real.name}-{name}"
    if home.is_relative_to(real) and not is_hidden(str(home.relative_to(real))):
        raise InputError(
            f"data.path={source} holds {cache}, where it is prepared: give another data.cache_dir"
        )
    try:
        digest, total = _state_of(source)
        out = home / digest[:12]
        home.mkdir(parents=True, exist_ok=True)
        # All processes of a node come here at once: one prepares, the others wait.
        with FileLock(home / ".lock"):
            _drop_unused(home, but=out)
            if not out.exists():
                _prepare(source, out, total)
            os.utime(out)
    except OSError as error:
        raise InputError(
            f"data.path={source} cannot be prepared in {home} ({error.filename or home}: {error_reason(error)}): "
            f"give data.cache_dir, or run `mae-vit prepare {source} OUT`"
        ) from None
    return out


def _prepare(source: Path, out: Path, total: int) -> None:
    """Writes all splits beside `out`, and moves them there: one that is killed must not leave some of them."""
    if total > (free := shutil.disk_usage(out.parent).free):
        raise InputError(
            f"data.path={source} has {total / 2**30:.3g} GiB of files to be prepared in {out.parent}, which has room "
            f"for {free / 2**30:.3g}: give data.cache_dir, or run `mae-vit prepare {source} OUT` and data.path=OUT"
        )
    partial = out.parent / ".partial"
    shutil.rmtree(partial, ignore_errors=True)
    try:
        # As a path, because "cifar10" names a download.
        images = find_images(os.path.join(".", source), out=partial)
        classes = Counter(entry.class_name for entry in images.entries if entry.split == "train")
        # Of fewer images a tenth is none.
        alone = max(classes.values(), default=0) >= 5 and not any(
            entry.split in MEASURED for entry in images.entries
        )
        held = f", a tenth held out as {HOLDOUT_SPLIT}" if alone else ""
        print(
            f"data.path={source} is not prepared: its images are written as shards to {out}, once{held}",
            flush=True,
        )
        report = prepare(
            [images],
            partial,
            selection=Selection(holdout=_HOLDOUT if alone else None),
            workers=default_workers(),
        )
        os.rename(partial, out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    print("\n".join(report.lines()), flush=True)


def _state_of(source: Path) -> tuple[str, int]:
    """Returns what changes when a file of a source does, and the bytes of all of them.

    Every rank looks for itself: they are not joined yet, and each node has a cache of its own.
    """
    lines, total = [__version__], 0
    top = len(os.fspath(source))
    files = list(walk(source)) if source.is_dir() else [source]
    if is_table(source):
        files += [row.file for row in read_table(source).rows if row.file]
    for file in files:
        # Systems write hidden files when somebody only looks.
        if is_hidden(name := os.fspath(file)[top:].lstrip("/")):
            continue
        try:
            status = file.stat()
        except OSError:  # a dead link, of which `prepare` says what it is
            continue
        total += status.st_size
        lines.append(f"{name} {status.st_size} {status.st_mtime_ns}")
    return hashlib.sha256("\n".join(sorted(lines)).encode("utf-8", "surrogateescape")).hexdigest(), total


def _drop_unused(home: Path, *, but: Path) -> None:
    for folder in home.iterdir():
        if folder.is_dir() and folder != but and time.time() - folder.stat().st_mtime > _UNUSED_S:
            shutil.rmtree(folder, ignore_errors=True)
