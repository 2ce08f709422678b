"""`mae-vit prepare`: its options and its final output."""

from __future__ import annotations

import argparse
import time
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING

from mae_vit.cli.prepare.checks import check_arguments
from mae_vit.cli.prepare.sources import (
    add_band_options,
    add_mask_options,
    add_parquet_options,
    band_options,
    opened_sources,
)
from mae_vit.config.command_line import OneLineParser, as_path, as_path_text
from mae_vit.core.errors import InputError
from mae_vit.core.messages import count_of, error_reason
from mae_vit.core.user_files import expand_text

if TYPE_CHECKING:
    from mae_vit.data.prepare.report import Report

_DESCRIPTION = """Write images as webdataset shards with a dataset.json. A later call adds splits.
Image bytes are stored unchanged, except with --resize or --exif-orientation apply."""


def add_prepare(commands: argparse._SubParsersAction[OneLineParser]) -> None:
    """Adds the command `prepare`."""
    parser = commands.add_parser(
        "prepare",
        help="write images as webdataset shards",
        usage="%(prog)s [options] SRC [SRC ...] OUT",
        description=_DESCRIPTION,
    )
    parser.add_argument(
        "paths",
        nargs="+",
        metavar="SRC... OUT",
        help="one or more sources, then the output folder; a source is digits, cifar10, cifar100, a folder with or "
        "without class folders, a .tar, .tar.gz or .zip of such a folder, a folder of existing webdataset shards, "
        "Parquet files or a folder of them, a CSV or TSV of paths and labels, or hf:USER/NAME[@REVISION] on the "
        "Hugging Face Hub",
    )
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument(
        "--in-place",
        action="store_true",
        help="the only path is a folder of existing webdataset shards: write dataset.json and indexes beside them",
    )
    instead.add_argument(
        "--reindex",
        action="store_true",
        help="the only path is a prepared folder: write its indexes again, from the headers of its shards",
    )
    parser.add_argument(
        "--root",
        type=as_path,
        metavar="DIR",
        help="folder of torchvision's CIFAR files, which are downloaded if missing",
    )
    parser.add_argument(
        "--split",
        default="train",
        metavar="NAME",
        help="split of the images that are outside of train/, val/ and test/ folders (train)",
    )
    parser.add_argument("--no-labels", action="store_true", help="do not take folders as classes")
    parser.add_argument(
        "--class-folder",
        choices=("first", "last"),
        help="the folder that is the class: the first below the split, or the last, which holds the image; prepare "
        "asks where folders have two meanings (first)",
    )
    parser.add_argument(
        "--name-encoding",
        metavar="NAME",
        help="encoding of names in an archive that are not in UTF-8: gbk, big5, cp932, cp437 ...",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace splits that exist")
    add_parquet_options(parser.add_argument_group("Parquet files, tables, data sets of the Hub, shards"))
    add_mask_options(parser.add_argument_group("segmentation"))
    _add_choice(parser.add_argument_group("selecting images (of train; val and test stay whole)"))
    _add_form(parser.add_argument_group("format"))
    add_band_options(parser.add_argument_group("images of bands (TIFF, NPY, DICOM, 16 bits)"))
    parser.set_defaults(run=run_prepare, parser=parser)


def _add_choice(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--subset",
        type=as_path,
        metavar="LIST",
        help="only images listed in this text file: keys, paths or file names, one a line",
    )
    group.add_argument(
        "--holdout",
        type=_share,
        metavar="SHARE",
        help="move this share of each class to a split val: held-out images (0.1 or 1/10)",
    )
    group.add_argument(
        "--fraction",
        type=_share,
        metavar="SHARE",
        help="only this share of each class, drawn by a hash of the key; a smaller share is part of a larger one",
    )
    group.add_argument(
        "--limit-per-class", type=int, metavar="N", help="at most N of each class, drawn in the same way"
    )
    group.add_argument(
        "--exclude",
        action="append",
        type=as_path_text,
        metavar="DIR",
        help="leave out images that also occur in the test and val splits of the prepared data in DIR, so that "
        "pretraining sees no test images (DIR:SPLIT for one split); may be given several times",
    )
    group.add_argument(
        "--exclude-distance",
        type=int,
        metavar="N",
        help="for --exclude: two images are copies if their 64-bit hashes differ in at most N bits (4)",
    )


def _add_form(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--resize",
        type=int,
        metavar="PX",
        help="resize larger images to a short side of PX (JPEG, bicubic, antialiased)",
    )
    group.add_argument(
        "--quality", type=int, metavar="Q", help="JPEG quality of images that are encoded again (90)"
    )
    group.add_argument(
        "--exif-orientation",
        choices=("apply", "ignore"),
        default="ignore",
        help="apply: turn images upright by their EXIF orientation, and encode them again (ignore)",
    )
    group.add_argument(
        "--max-pixels", type=int, metavar="N", help="leave out images of more pixels (178956970)"
    )
    group.add_argument("--workers", type=int, metavar="N", help="decoding processes (one for each core)")
    group.add_argument("--shard-mib", type=int, metavar="N", help="largest size of a shard, in MiB (256)")
    group.add_argument(
        "--shard-samples", type=int, metavar="N", help="largest number of images in a shard (10000)"
    )


def _share(text: str) -> Fraction:
    try:
        return Fraction(text)
    except (ValueError, ZeroDivisionError):
        raise argparse.ArgumentTypeError(f"{text!r} is no share such as 0.1 or 1/10") from None


def run_prepare(arguments: argparse.Namespace) -> int:
    """Runs the command.

    Raises:
        InputError: for every error that the user can fix.
    """
    # Here and not by argparse, which leaves words behind an option as they are (`parse`).
    arguments.paths = [expand_text(text) for text in arguments.paths]
    check_arguments(arguments)
    begun = time.monotonic()
    out = Path(arguments.paths[-1])
    try:
        report = _describe(arguments) if arguments.in_place or arguments.reindex else _prepare(arguments)
    except OSError as error:
        raise InputError(f"{error.filename or out}: {error_reason(error)}") from None
    print("\n".join(report.lines()))
    classes = len(report.dataset.classes)
    labels = count_of(classes, "class", "classes") if classes else "no labels"
    print(f"{out}: {labels}, {time.monotonic() - begun:.1f} s")
    if classes == 1 and report.dataset.segmentation is None:
        alone = "" if arguments.in_place or arguments.reindex else "; --no-labels prepares images alone"
        print(f"note: with one class there is nothing to tell apart{alone}")
    return 0


def _prepare(arguments: argparse.Namespace) -> Report:
    from mae_vit.data.images.decode import MAX_PIXELS
    from mae_vit.data.images.preprocess import DEFAULT_QUALITY
    from mae_vit.data.prepare.convert import Conversion
    from mae_vit.data.prepare.convert_pool import default_workers
    from mae_vit.data.prepare.near_duplicates import DEFAULT_DISTANCE
    from mae_vit.data.prepare.prepare import DEFAULT_SHARD_MIB, DEFAULT_SHARD_SAMPLES, prepare
    from mae_vit.data.prepare.selection import Selection

    distance = arguments.exclude_distance
    with opened_sources(arguments) as sources:
        return prepare(
            sources,
            Path(arguments.paths[-1]),
            overwrite=arguments.overwrite,
            shard_bytes=(arguments.shard_mib or DEFAULT_SHARD_MIB) << 20,
            shard_samples=arguments.shard_samples or DEFAULT_SHARD_SAMPLES,
            selection=Selection(
                subset=arguments.subset,
                holdout=arguments.holdout,
                fraction=arguments.fraction,
                limit_per_class=arguments.limit_per_class,
            ),
            conversion=Conversion(
                resize=arguments.resize,
                quality=arguments.quality or DEFAULT_QUALITY,
                upright=arguments.exif_orientation == "apply",
                max_pixels=arguments.max_pixels or MAX_PIXELS,
                bands=band_options(arguments),
            ),
            exclude=arguments.exclude or (),
            exclude_distance=DEFAULT_DISTANCE if distance is None else distance,
            workers=default_workers() if arguments.workers is None else arguments.workers,
        )


def _describe(arguments: argparse.Namespace) -> Report:
    from mae_vit.data.prepare.convert_pool import default_workers
    from mae_vit.data.prepare.in_place import index_in_place, reindex

    if arguments.reindex:
        return reindex(Path(arguments.paths[0]))
    return index_in_place(
        Path(arguments.paths[0]),
        split=arguments.split,
        overwrite=arguments.overwrite,
        max_pixels=arguments.max_pixels,
        bands=band_options(arguments),
        workers=default_workers() if arguments.workers is None else arguments.workers,
    )
