"""Resolves `model.in_chans`, the number of input channels, from the data."""

from __future__ import annotations

from typing import TypeVar

from mae_vit.config.schema import Config
from mae_vit.core.errors import InputError
from mae_vit.core.urls import redact_url
from mae_vit.data.data_path import resolve_data_path
from mae_vit.data.shards.dataset_json import Dataset, read_dataset

AnyConfig = TypeVar("AnyConfig", bound=Config)
# 8-bit photographs can be read as gray or as RGB, whichever they are.
_OF_PHOTOGRAPHS = (1, 3)


def describe_data(config: Config, *, say: bool = False) -> Dataset:
    """Reads the description of a config's data; `say` prints a warning if a URL's earlier copy is used.

    Raises:
        InputError: if the data do not exist.
    """
    section = config.data
    folder, _ = resolve_data_path(
        section.path, cache_dir=section.cache_dir, cache_gib=section.cache_gib, say=say
    )
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
            f"model.in_chans={wanted}, but the images of {path} have {count} bands: leave it out, or choose bands when "
            "they are prepared (mae-vit prepare --bands)"
        )
    if dataset.bands.photographs and wanted not in _OF_PHOTOGRAPHS:
        raise InputError(
            f"model.in_chans={wanted}, but the images of {path} are 8-bit photographs: leave it out, or give 1 or 3"
        )
    return config


def set_channels(config: AnyConfig, channels: int) -> AnyConfig:
    """Returns the config with another `model.in_chans`."""
    return config.model_copy(update={"model": config.model.model_copy(update={"in_chans": channels})})
