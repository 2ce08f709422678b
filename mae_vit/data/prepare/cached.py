"""Prepares the images at `data.path` once, in a cache folder."""

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
from mae_vit.core.messages import error_reason
from mae_vit.core.user_files import is_hidden
from mae_vit.data.prepare.convert import default_workers
from mae_vit.data.prepare.prepare import prepare
from mae_vit.data.prepare.selection import HOLDOUT_SPLIT, MEASURED, Selection
from mae_vit.data.prepare.sources.find import find_images, naming_prepare
from mae_vit.data.prepare.sources.folders import walk
from mae_vit.data.prepare.sources.tables import is_table, read_table

# Copies of other states of a source are removed if unused for this long; a run may still be reading younger ones.
_UNUSED_S = 30 * 24 * 3600
_HOLDOUT = Fraction(1, 10)


def prepare_once(source: Path, cache: Path) -> Path:
    """Returns the folder of the prepared source; prepares it if the folder is missing or the source has changed."""
    real = source.resolve()
    name = hashlib.sha256(str(real).encode("utf-8", "surrogateescape")).hexdigest()[:8]
    home = cache.resolve() / "mae-vit-prepared" / f"{real.name}-{name}"
    if home.is_relative_to(real) and not is_hidden(str(home.relative_to(real))):
        raise InputError(
            f"data.path={source} contains {cache}, where it would be prepared; give another data.cache_dir"
        )
    try:
        digest, total = _state_of(source.absolute())
        out = home / digest[:12]
        home.mkdir(parents=True, exist_ok=True)
        # All processes of a node come here at once: one prepares, the others wait.
        with FileLock(home / ".lock"):
            for folder in home.iterdir():
                unused = folder.is_dir() and folder != out
                if unused and time.time() - folder.stat().st_mtime > _UNUSED_S:
                    shutil.rmtree(folder, ignore_errors=True)
            if not out.exists():
                with naming_prepare(source):
                    _prepare(source, out, total)
            os.utime(out)
    except OSError as error:
        raise InputError(
            f"data.path={source} cannot be prepared in {home} ({error.filename or home}: {error_reason(error)}); "
            f"give data.cache_dir, or run `mae-vit prepare {source} OUT`"
        ) from None
    return out


def _prepare(source: Path, out: Path, total: int) -> None:
    """Writes all splits to a folder beside `out`, then renames it, so that a kill leaves no partial copy."""
    if total > (free := shutil.disk_usage(out.parent).free):
        raise InputError(
            f"data.path={source} has {total / 2**30:.3g} GiB of files, {out.parent} only {free / 2**30:.3g} GiB "
            f"free; give data.cache_dir, or run `mae-vit prepare {source} OUT`"
        )
    partial = out.parent / ".partial"
    shutil.rmtree(partial, ignore_errors=True)
    try:
        # As a path with "./", because "cifar10" alone names a download.
        images = find_images(os.path.join(".", source), out=partial)
        classes = Counter(entry.class_name for entry in images.entries if entry.split == "train")
        # A tenth of fewer than 5 images rounds to none.
        alone = max(classes.values(), default=0) >= 5 and not any(
            entry.split in MEASURED for entry in images.entries
        )
        held = f", a tenth held out as {HOLDOUT_SPLIT}" if alone else ""
        print(
            f"data.path={source} is not prepared; writing its images as shards to {out}, once{held}",
            flush=True,
        )
        report = prepare(
            [images],
            partial,
            selection=Selection(holdout=_HOLDOUT if alone else None),
            workers=default_workers(),
        )
        report.record(partial, f"data.path={source}")
        os.rename(partial, out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    print("\n".join(report.lines()), flush=True)


def _state_of(source: Path) -> tuple[str, int]:
    """Returns a hash of a source's file names, sizes and times, and the total size in bytes; the path is absolute.

    Every rank computes it: the ranks are not connected yet, and each node has its own cache.
    """
    lines, total = [__version__], 0
    top = len(os.fspath(source))
    files = list(walk(source)) if source.is_dir() else [source]
    if is_table(source):
        files += [row.file for row in read_table(source)[0] if row.file]
    for file in files:
        # Operating systems write hidden files when a folder is only viewed. A table names its files.
        if is_hidden(name := os.fspath(file)[top:].lstrip("/")) and source.is_dir():
            continue
        try:
            status = file.stat()
        except OSError:  # a dead link, which `prepare` reports
            continue
        total += status.st_size
        lines.append(f"{name} {status.st_size} {status.st_mtime_ns}")
    return hashlib.sha256("\n".join(sorted(lines)).encode("utf-8", "surrogateescape")).hexdigest(), total
