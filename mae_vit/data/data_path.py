"""From `data.path` to a folder of shards here: itself, a copy prepared from images, or what stands in for a URL."""

from __future__ import annotations

import os
from pathlib import Path

from mae_vit.core.errors import InputError
from mae_vit.core.files import user_cache
from mae_vit.core.urls import is_url, redact_url
from mae_vit.data.remote.folder import DataLocation, open_remote
from mae_vit.data.shards.dataset_json import FILE_NAME, SOURCES


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
        # Thirty modules that a run on shards does not need.
        from mae_vit.data.prepare.cached import prepare_once

        return DataLocation(prepare_once(source, Path(cache_dir) if cache_dir else user_cache()))
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
    near = next((candidate for candidate in around if candidate.exists()), None)
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
