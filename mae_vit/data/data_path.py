"""Resolves `data.path` to a local folder of shards, the split for evaluation, and `model.in_chans` from the data.

The folder is the path itself, a copy prepared from images, or the cache of a URL.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TypeVar

from mae_vit.config.load import read_run_config
from mae_vit.config.plugins import named_plugins, not_imported
from mae_vit.config.schema import Config
from mae_vit.core.errors import InputError
from mae_vit.core.files import user_cache
from mae_vit.core.urls import is_url, redact_url
from mae_vit.data.remote.folder import DataLocation, open_remote
from mae_vit.data.shards.dataset_json import FILE_NAME, SOURCES, Dataset, read_dataset

AnyConfig = TypeVar("AnyConfig", bound=Config)


def resolve_data_path(
    path: str, *, cache_dir: str | None = None, cache_gib: float | None = None, say: bool = False
) -> DataLocation:
    """Returns the local data folder of a path.

    A folder of shards is used as it is. Unprepared images (a folder, an archive, a table) are prepared once into the
    cache folder, as `mae-vit prepare` does by default; if they have no val or test split, a tenth is held out as
    "val". For a URL, the folder is its local cache, with the description fetched; one
    process of each node has `say`, and prints where it is.

    Raises:
        InputError: if a URL cannot be opened, or images cannot be prepared.
    """
    if is_url(path):
        return open_remote(path, cache_dir=cache_dir, cache_gib=cache_gib, say=say)
    source = Path(path)
    if path not in SOURCES and is_unprepared(source):
        # Imports thirty modules that a run on shards does not need.
        from mae_vit.data.prepare.cached import prepare_once

        return DataLocation(prepare_once(source, Path(cache_dir) if cache_dir else user_cache()))
    if cache_dir is not None:
        raise InputError(f"data.cache_dir has no effect, since {path} is read where it is; leave it out")
    return DataLocation(source)


def describe_place(path: str, folder: Path) -> str:
    """Formats a data path for messages, with the folder that its images were prepared in."""
    prepared = not is_url(path) and folder != Path(path)
    return f"{path} (prepared in {folder})" if prepared else redact_url(path)


def check_recorded(path: str, run: Path, remedy: str) -> None:
    """Checks that a run's data exist where its config says; the run may have moved, also to another machine.

    A relative `path` is resolved from the working folder, not the run's. In `remedy`, the end of the message, the path
    that is probably meant replaces DIR.

    Raises:
        InputError: if the path does not exist.
    """
    if is_url(path) or path in SOURCES or os.path.exists(path):
        return
    around = (parent / path for parent in run.absolute().parents)
    # Runs and images may have the same name.
    near = next((each for each in around if each.exists() and not each.samefile(run)), None)
    seen = "" if os.path.isabs(path) else f" from {Path.cwd()}"
    plugins = not_imported(named_plugins(read_run_config(run), ()))
    seen += "".join(f", and may be of its plug-in {name}, which was not given" for name in plugins)
    raise InputError(
        f"{run} recorded data.path={path}, which does not exist{seen}; {remedy.replace('DIR', str(near or 'DIR'))}"
    )


def is_unprepared(source: Path) -> bool:
    """Whether a path holds images that are not prepared yet, rather than shards."""
    if source.is_dir():
        return not (source / FILE_NAME).exists() and any(source.iterdir()) and not any(source.glob("*.tar"))
    # A single shard of a prepared folder is not the data.
    return source.is_file() and not (source.parent / FILE_NAME).exists()


def describe_data(config: Config) -> Dataset:
    """Reads the description of a config's data; raises InputError if they do not exist."""
    section = config.data
    folder, _ = resolve_data_path(section.path, cache_dir=section.cache_dir, cache_gib=section.cache_gib)
    return read_dataset(folder)


def with_channels(config: AnyConfig, dataset: Dataset) -> AnyConfig:
    """Returns the config with `model.in_chans`, taken from the data unless the config sets it.

    Raises:
        InputError: if the config's value contradicts the data.
    """
    wanted, count = config.model.in_chans, dataset.channels
    if wanted is None:
        # ImageNet's normalization has three channels, so gray photographs are read as RGB.
        as_rgb = config.data.normalize == "imagenet" and dataset.bands.photographs
        return set_channels(config, 3 if as_rgb else count)
    path = redact_url(config.data.path)
    if not dataset.bands.photographs and wanted != count:
        raise InputError(
            f"model.in_chans={wanted}, but the images of {path} have {count} bands; choose {wanted} with mae-vit "
            "prepare --bands, or leave model.in_chans out if you gave it"
        )
    # 8-bit photographs can be read as gray or as RGB, whichever they are.
    if dataset.bands.photographs and wanted not in (1, 3):
        raise InputError(
            f"model.in_chans={wanted}, but the images of {path} are 8-bit photographs; leave it out, or give 1 or 3"
        )
    return config


def set_channels(config: AnyConfig, channels: int) -> AnyConfig:
    """Returns the config with another `model.in_chans`."""
    return config.model_copy(update={"model": config.model.model_copy(update={"in_chans": channels})})
