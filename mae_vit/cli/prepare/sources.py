"""The sources of `mae-vit prepare`: their options, and how they are opened."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from mae_vit.config.command_line import as_path
from mae_vit.core.errors import InputError
from mae_vit.core.files import leaving_no_empty_folders
from mae_vit.core.hub import is_hub_name

if TYPE_CHECKING:
    from mae_vit.data.prepare.bands.options import BandOptions
    from mae_vit.data.prepare.entries import ImageSource

_COLUMNS = ("image_column", "label_column")


def add_parquet_options(group: argparse._ArgumentGroup) -> None:
    """Adds the options of Parquet files and of data sets of the Hub."""
    group.add_argument(
        "--image-column",
        metavar="NAME",
        help="column of the images, as {bytes, path} or bytes, in a table their paths (the only such column); of "
        "shards with several images a sample, the extension of the one to take, such as input.jpg",
    )
    group.add_argument(
        "--label-column",
        metavar="NAME",
        help="column of the labels, as ClassLabel, integers or strings (the ClassLabel, or a column named label); of "
        "shards a key of their .json members, or an extension such as txt (cls)",
    )
    group.add_argument(
        "--config-name", metavar="NAME", help="configuration of a Hub data set that has several (default)"
    )


def add_mask_options(group: argparse._ArgumentGroup) -> None:
    """Adds the options of masks."""
    group.add_argument(
        "--masks",
        type=as_path,
        metavar="DIR",
        help="of the masks: PNGs at the same paths as the images of SRC",
    )
    group.add_argument(
        "--mask-classes",
        type=as_path,
        metavar="FILE",
        help='names of classes, one a line: the first is that of id 0, or lines "ID: NAME"',
    )
    group.add_argument("--mask-ignore", type=int, metavar="ID", help="of pixels that do not count (255)")
    group.add_argument("--masked-only", action="store_true", help="leave out images that have no mask")


def _check_masks(arguments: argparse.Namespace) -> None:
    if arguments.masks is None:
        for name in ("mask_classes", "mask_ignore", "masked_only"):
            if getattr(arguments, name) not in (None, False):
                raise InputError(f"--{name.replace('_', '-')} changes nothing without --masks")
        return
    if arguments.mask_classes is None:
        raise InputError("--masks needs --mask-classes FILE: names of classes, one a line, the first of id 0")
    if arguments.mask_ignore is not None and not 0 <= arguments.mask_ignore < 1 << 16:
        raise InputError(f"--mask-ignore {arguments.mask_ignore}: 0 to 65535")
    if len(arguments.paths) != 2 or not Path(arguments.paths[0]).is_dir():
        raise InputError("--masks takes one source, a folder of images")
    if not arguments.masks.is_dir():
        raise InputError(f"--masks {arguments.masks} is no folder")
    if arguments.exif_orientation == "apply":
        raise InputError("--exif-orientation apply turns images, not masks: leave it out with --masks")


def _with_masks(source: ImageSource, arguments: argparse.Namespace) -> ImageSource:
    from mae_vit.data.prepare.masks import DEFAULT_IGNORE, pair_masks, read_classes
    from mae_vit.data.prepare.sources.folders import open_folder

    ignore = DEFAULT_IGNORE if arguments.mask_ignore is None else arguments.mask_ignore
    return pair_masks(
        source,
        open_folder(arguments.masks),
        where=str(arguments.masks),
        segmentation=read_classes(arguments.mask_classes, ignore),
        partly=arguments.masked_only,
    )


def check_sources(arguments: argparse.Namespace) -> None:
    """Refuses options that change nothing for the sources that are given.

    Raises:
        InputError: for each.
    """
    from mae_vit.data.prepare.folder_names import check_encoding
    from mae_vit.data.prepare.sources.find import DOWNLOADS

    sources = arguments.paths[:-1]
    if arguments.root and not any(source in DOWNLOADS for source in sources):
        raise InputError(f"--root changes nothing: no source is {' or '.join(DOWNLOADS)}")
    own = {*DOWNLOADS, "digits"}
    if sources and arguments.split != "train" and own.issuperset(sources):
        raise InputError(f"--split changes nothing: {', '.join(sources)} has splits of its own")
    if arguments.config_name and not any(map(is_hub_name, sources)):
        raise InputError("--config-name changes nothing: no source is hf:USER/NAME")
    for name in _COLUMNS:
        if getattr(arguments, name) and sources and own.issuperset(sources):
            raise InputError(
                f"--{name.replace('_', '-')} changes nothing: no source is of Parquet files, tables or shards"
            )
    if arguments.label_column and arguments.no_labels:
        raise InputError("--label-column changes nothing with --no-labels")
    if arguments.class_folder and arguments.no_labels:
        raise InputError("--class-folder changes nothing with --no-labels")
    if arguments.name_encoding:
        check_encoding(arguments.name_encoding)
    _check_masks(arguments)


@contextmanager
def opened_sources(arguments: argparse.Namespace) -> Iterator[list[ImageSource]]:
    """Opens the sources that the command line names; leaves no empty output folder if the command fails.

    Raises:
        InputError: if there is none, or holds no images.
        FetchUnavailable: if one cannot be fetched now.
    """
    from mae_vit.data.prepare.entries import SourceOptions
    from mae_vit.data.prepare.sources.find import find_sources

    *specs, out = arguments.paths
    options = SourceOptions(
        out=Path(out),
        split=arguments.split,
        root=arguments.root,
        labels=not arguments.no_labels,
        image_column=arguments.image_column,
        label_column=arguments.label_column,
        config_name=arguments.config_name,
        overwrite=arguments.overwrite,
        class_folder=arguments.class_folder,
        name_encoding=arguments.name_encoding,
    )
    with leaving_no_empty_folders(options.out):
        sources = find_sources(specs, options)
        yield [_with_masks(source, arguments) for source in sources] if arguments.masks else sources


def add_band_options(group: argparse._ArgumentGroup) -> None:
    """Adds the options."""
    group.add_argument(
        "--bands",
        metavar="LIST",
        help="take these bands in this order: numbers from 1, ranges or names (4,3,2 or 1-4 or red,nir)",
    )
    group.add_argument(
        "--scale",
        metavar="BY",
        help="raw values that become 0 and 1: LOW,HIGH, or percentiles (1 and 99 of each band), or none (the range "
        "of their type). The default is percentiles, of 8 bits none. Stored values stay raw",
    )
    group.add_argument(
        "--nodata",
        metavar="V",
        help="raw value of missing pixels, left out of statistics and losses (what GDAL wrote into the files; NaN)",
    )
    group.add_argument(
        "--window",
        metavar="C,W",
        help="clip raw values to a center and a width, such as 40,400 Hounsfield units, which is the scale too",
    )
    group.add_argument(
        "--take",
        metavar="KIND",
        help="where files differ, leave out all but these: bands and type (13xuint16), or 8-bit (16 bits become 8)",
    )


def band_options(arguments: argparse.Namespace) -> BandOptions:
    """Returns the options of a command line.

    Raises:
        InputError: for one that makes no sense.
    """
    # Slow to import, so that --help is not.
    from mae_vit.data.prepare.bands.options import read_options

    return read_options(
        bands=arguments.bands,
        scale=arguments.scale,
        nodata=arguments.nodata,
        window=arguments.window,
        take=arguments.take,
    )
