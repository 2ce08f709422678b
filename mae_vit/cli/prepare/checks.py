"""Checks of the options of `mae-vit prepare`."""

from __future__ import annotations

import argparse

from mae_vit.cli.prepare.sources import check_sources
from mae_vit.core.errors import InputError

_NOT_IN_PLACE = (
    "subset", "holdout", "fraction", "limit_per_class", "resize", "quality", "root", "no_labels", "exclude",
    "shard_mib", "shard_samples", "exif_orientation", "image_column", "label_column", "config_name",
    "bands", "window", "take",
    "class_folder", "name_encoding", "masks", "mask_classes", "mask_ignore", "masked_only",
)  # fmt: skip
_NOT_IN_REINDEX = ("split", "overwrite", "max_pixels", "workers", "scale", "nodata")


def check_arguments(arguments: argparse.Namespace) -> None:
    """Checks what `mae-vit prepare` was given, before anything is read.

    Raises:
        InputError: for an option that cannot be, or that changes nothing beside the others.
    """
    # Slow to import, so that --help is not.
    from mae_vit.data.images.decode import MAX_PIXELS

    if arguments.in_place or arguments.reindex:
        _check_in_place(arguments, "--in-place" if arguments.in_place else "--reindex")
    elif len(arguments.paths) < 2:
        raise InputError(
            f"prepare needs sources and an output folder, not {arguments.paths[-1]} alone (see --help)"
        )
    for name in ("shard_mib", "shard_samples", "limit_per_class", "resize", "max_pixels"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise InputError(f"--{name.replace('_', '-')} {value}: at least 1")
    if arguments.max_pixels is not None and arguments.max_pixels > MAX_PIXELS:
        raise InputError(f"--max-pixels {arguments.max_pixels}: training decodes at most {MAX_PIXELS}")
    if arguments.workers is not None and arguments.workers < 0:
        raise InputError(f"--workers {arguments.workers}: at least 0")
    if arguments.quality is not None and not 1 <= arguments.quality <= 100:
        raise InputError(f"--quality {arguments.quality}: 1 to 100")
    if arguments.quality is not None and not (arguments.resize or arguments.exif_orientation == "apply"):
        raise InputError("--quality changes nothing without --resize or --exif-orientation apply")
    _check_exclusion(arguments)
    for name in ("holdout", "fraction"):
        share = getattr(arguments, name)
        if share is not None and not 0 < share <= 1:
            raise InputError(f"--{name} {share}: over 0, {'below' if name == 'holdout' else 'at most'} 1")
    if arguments.holdout == 1:
        raise InputError("--holdout 1: below 1, or no training images would be left")
    if not arguments.split.replace("_", "").isalnum():
        raise InputError(f'--split "{arguments.split}": letters, digits and _ only')
    check_sources(arguments)


def _check_in_place(arguments: argparse.Namespace, option: str) -> None:
    if len(arguments.paths) > 1:
        raise InputError(f"{option} takes one folder, not {len(arguments.paths)}")
    for name in (*_NOT_IN_PLACE, *(_NOT_IN_REINDEX if arguments.reindex else ())):
        if str(getattr(arguments, name)) not in ("None", "False", "ignore", "train"):
            why = "changes nothing" if name in _NOT_IN_REINDEX else "needs an OUT folder"
            raise InputError(f"{option} changes no shards: --{name.replace('_', '-')} {why}")


def _check_exclusion(arguments: argparse.Namespace) -> None:
    from mae_vit.data.prepare.near_duplicates import MAX_DISTANCE

    distance = arguments.exclude_distance
    if distance is not None and not arguments.exclude:
        raise InputError("--exclude-distance changes nothing without --exclude")
    if distance is not None and not 0 <= distance <= MAX_DISTANCE:
        raise InputError(f"--exclude-distance {distance}: 0 to {MAX_DISTANCE}")
