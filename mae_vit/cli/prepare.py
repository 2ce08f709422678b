"""`mae-vit prepare`: its options, their checks and its final output."""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Callable, Sequence, Set
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mae_vit.cli.values import bands, kind, nodata, scale, share, whole, window, word
from mae_vit.config.command_line import OneLineParser, as_path, as_path_text
from mae_vit.core.errors import InputError
from mae_vit.core.files import leaving_no_empty_folders
from mae_vit.core.hub import is_hub_name
from mae_vit.core.messages import count_of, error_reason
from mae_vit.core.user_files import expand_text

# The modules of `mae_vit.data.prepare` are slow to import, and --help must be fast.
if TYPE_CHECKING:
    from mae_vit.data.prepare.prepare import Report

_EXAMPLES = """  mae-vit prepare photos/ data/photos --holdout 1/10     photos/CLASS/*.jpg, or photos/*.jpg
  mae-vit prepare photos/ data/photos --holdout 1/10 --labels labels.csv     lines of image,class
  mae-vit prepare photos/ data/photos --holdout 1/10 --unlabeled more/       more for pretraining
  mae-vit prepare cifar10 data/cifar10 --preview         and draw data/cifar10/preview.png
"""
_DESCRIPTION = """Write images as webdataset shards with a dataset.json. A later call adds splits.
Image bytes are stored unchanged, except with --resize or --exif-orientation apply;
images of bands are stored as NPY."""
_SOURCES = (
    "one or more sources, then the output folder; a source is digits, cifar10, cifar100, a folder with or without "
    "class folders, a .tar, .tar.gz or .zip of such a folder, a folder of existing webdataset shards, Parquet files or "
    "a folder of them, a CSV or TSV of paths and labels, or hf:USER/NAME[@REVISION] on the Hugging Face Hub"
)
_IN_PLACE = {"--in-place", "--split", "--overwrite", "--workers", "--scale", "--nodata"}
# An option -> the options of which it needs at least one to have an effect.
_NEEDS = {
    "--quality": ("--resize", "--exif-orientation"),
    **dict.fromkeys(("--mask-classes", "--mask-ignore", "--masked-only"), ("--masks",)),
}


def add_prepare(commands: argparse._SubParsersAction[OneLineParser]) -> None:
    """Adds the command `prepare`."""
    parser = commands.add_parser(
        "prepare",
        help="write images as webdataset shards",
        usage="%(prog)s [options] SRC [SRC ...] OUT",
        examples=_EXAMPLES,
        description=_DESCRIPTION,
    )
    # fmt: off
    parser.add_argument("paths", nargs="+", metavar="SRC... OUT", help=_SOURCES)
    _add_switch(parser, "--in-place", "the only path is a folder of existing webdataset shards: add dataset.json "
        "and indexes to it; with --overwrite again, after shards or indexes changed")
    _add(parser, "--root", "DIR", as_path, "folder of torchvision's CIFAR files, which are downloaded if missing")
    _add(parser, "--split", "NAME", word, "split of the images that are outside of train/, val/ and test/ folders "
        "(train)")
    _add_labels(parser)
    _add_switch(parser, "--overwrite", "replace splits that exist")

    group = parser.add_argument_group("Parquet files, tables, data sets of the Hub, shards")
    _add(group, "--image-column", "NAME", str, "column of the images, as {bytes, path} or bytes, in a table their "
        "paths (the only such column); of shards with several images a sample, the extension of the one to take, such "
        "as input.jpg")
    _add(group, "--label-column", "NAME", str, "column of the labels, as ClassLabel, integers or strings (the "
        "ClassLabel, or a column named label); of shards a key of their .json members, or an extension such as txt "
        "(cls)")
    _add(group, "--config-name", "NAME", str, "configuration of a Hub data set that has several (default)")

    group = parser.add_argument_group("segmentation")
    _add(group, "--masks", "DIR", as_path, "folder of the masks: PNGs at the paths of the images of SRC")
    _add(group, "--mask-classes", "FILE", as_path, "names of classes, one per line, starting with id 0; or lines "
        '"ID: NAME"')
    _add(group, "--mask-ignore", "ID", whole(0, 0xFFFF), "id of pixels that do not count (255)", 255)
    _add_switch(group, "--masked-only", "leave out images that have no mask")

    group = parser.add_argument_group("selecting images (of train; val and test stay whole)")
    _add(group, "--holdout", "SHARE", share, "move this share of each class to a split val: held-out images (0.1 or "
        "1/10)")
    _add(group, "--fraction", "SHARE", share, "only this share of each class, drawn by a hash of the key; a smaller "
        "share is part of a larger one")
    _add(group, "--limit-per-class", "N", whole(1), "at most N of each class, drawn in the same way")
    group.add_argument("--exclude", metavar="DIR", type=as_path_text, action="append", help="leave out images that "
        "also occur in the test and val splits of the prepared data in DIR, so that pretraining sees no test images "
        "(DIR:SPLIT for one split); may be given several times")

    group = parser.add_argument_group("format")
    _add(group, "--resize", "PX", whole(1), "resize larger images to a short side of PX (JPEG, bicubic, antialiased)")
    _add(group, "--quality", "Q", whole(1, 100), "JPEG quality of images that are encoded again (90)", 90)
    group.add_argument("--exif-orientation", choices=("apply", "ignore"), default="ignore", help="apply: turn images "
        "upright by their EXIF orientation, and encode them again (ignore)")
    _add(group, "--workers", "N", whole(0), "decoding processes (one for each core)")
    _add(group, "--shard-mib", "N", whole(1), "largest size of a shard, in MiB (256)", 256)
    _add(group, "--shard-samples", "N", whole(1), "largest number of images in a shard (10000)", 10_000)

    group = parser.add_argument_group("images of bands (TIFF, NPY, DICOM, 16 bits)")
    _add(group, "--bands", "LIST", bands, "use these bands in this order: numbers from 1, ranges or names (4,3,2 "
        "or 1-4 or red,nir)")
    _add(group, "--scale", "BY", scale, "raw values that become 0 and 1: LOW,HIGH; or percentiles (1 and 99 of "
        "each band); or none (the range of their type). Default: percentiles, for 8 bits none. Stored values stay raw")
    _add(group, "--nodata", "V", nodata, "raw value of missing pixels, left out of statistics and losses (what GDAL "
        "wrote into the files; NaN)")
    _add(group, "--window", "C,W", window, "clip raw values to a center and a width, such as 40,400 Hounsfield units, "
        "which is the scale too")
    _add(group, "--take", "KIND", kind, "where files differ, keep only these: bands and type (13xuint16), or "
        "8-bit (16 bits become 8)")
    # fmt: on
    parser.set_defaults(run=run_prepare, parser=parser)


def _add_labels(parser: OneLineParser) -> None:
    # fmt: off
    group = parser.add_argument_group("labels (by default those of class folders and of columns)")
    # `labels` is whether to read any.
    group.add_argument("--labels", metavar="FILE", dest="label_file", type=as_path, help="CSV or TSV with the "
        "label of each image, such as cats/1.jpg,cat. The header line, folders and extensions are optional; images "
        "that are not listed have no label. Give --image-column and --label-column as names, or as numbers from 1")
    _add(group, "--unlabeled", "DIR", as_path_text, "add these images to split train, without labels: pretraining "
        "uses all, fine-tuning those with labels. --holdout and other selections do not apply to them")
    _add_switch(group, "--preview", "also draw OUT/preview.png: some images of each class, with the number of all")
    group.add_argument("--no-labels", dest="labels", action="store_false", help="do not read folder names as classes")
    group.add_argument("--class-folder", choices=("first", "last"), help="the folder that is the class: the first "
        "below the split, or the last, around the image; prepare asks if that is not clear (first)")
    # fmt: on


def _add(
    group: argparse._ActionsContainer,
    name: str,
    metavar: str,
    kind: Callable[[str], Any],
    text: str,
    default: Any = None,
) -> None:
    group.add_argument(name, metavar=metavar, type=kind, default=default, help=text)


def _add_switch(group: argparse._ActionsContainer, name: str, text: str) -> None:
    group.add_argument(name, action="store_true", help=text)


def run_prepare(arguments: argparse.Namespace) -> int:
    """Runs the command; raises InputError for every error that the user can fix."""
    # Not by argparse's `type`, as `parse` adds paths that follow an option as plain text.
    arguments.paths = [expand_text(text) for text in arguments.paths]
    _check(arguments)
    begun = time.monotonic()
    out = Path(arguments.paths[-1])
    try:
        report = _prepare(arguments)
        if not arguments.in_place:
            report.record(out, shlex.join(["mae-vit", *arguments.typed]))
    except OSError as error:
        raise InputError(f"{error.filename or out}: {error_reason(error)}") from None
    print("\n".join(report.lines()))
    if arguments.preview:
        _preview(out, report)
    # Imports numpy.
    from mae_vit.data.prepare.listing import shown

    names = report.dataset.classes
    labels = f"{count_of(len(names), 'class', 'classes')} ({shown(names)})" if names else "no labels"
    print(f"{out}: {labels}, {time.monotonic() - begun:.1f} s")
    if len(names) == 1 and report.dataset.segmentation is None:
        alone = "" if arguments.in_place else "; --no-labels prepares the images without it"
        print(f"note: a single class cannot be learned{alone}")
    if "train" in report.dataset.splits:
        print(f"  next      mae-vit recommend {shlex.quote(str(out))}")
    return 0


def _preview(out: Path, report: Report) -> None:
    """Draws the contact sheet, or says why not: the data set is complete without it."""
    # Imports torch.
    from mae_vit.data.prepare.preview import write_preview

    try:
        path = write_preview(
            out, report.dataset, min(report.written, key=lambda split: (split != "train", split))
        )
    except Exception as error:  # the shards are written, so nothing here may fail the command
        print(f"warning: no preview: {error_reason(error)}; the data set is complete", file=sys.stderr)
    else:
        print(f"preview: {path}")


def _check(arguments: argparse.Namespace) -> None:
    """Rejects impossible combinations, and options without effect; raises InputError for the first."""
    from mae_vit.data.prepare.sources.downloads import DATASETS

    *sources, last = arguments.paths
    parser = arguments.parser
    changed = {name for name, value in vars(arguments).items() if value != parser.get_default(name)}
    options = {name for action in parser._actions if action.dest in changed for name in action.option_strings}
    if arguments.in_place and sources:
        raise InputError(f"--in-place needs one folder, not {len(arguments.paths)}; run it for each")
    if not sources and not arguments.in_place:
        raise InputError(f"{last} is the only path; give the sources, then the output folder (see --help)")
    if arguments.holdout == 1:
        raise InputError("--holdout 1: must be below 1, since no training images would be left")
    useless = _without_effect(sources, options, arguments.take)
    if found := sorted(options & useless.keys()):
        raise InputError(f"{found[0]} has no effect {useless[found[0]]}; leave it out")
    if "--labels" in options and (len(sources) > 1 or sources[0] in DATASETS):
        raise InputError(
            "--labels needs exactly one source without labels of its own, such as a folder or an archive"
        )
    if {"--labels", "--masks"} <= options:
        raise InputError("--labels (classes of images) and --masks (classes of pixels) exclude each other")
    if arguments.masks and arguments.mask_classes is None:
        raise InputError("--masks needs --mask-classes FILE, a class name on each line, starting with id 0")
    if arguments.masks and (len(sources) != 1 or not Path(sources[0]).is_dir()):
        raise InputError("--masks needs exactly one source, a folder of images")


def _without_effect(sources: Sequence[str], options: Set[str], take: str | None) -> dict[str, str]:
    """Returns options that have no effect on these sources or with the other options, each with the reason."""
    from mae_vit.data.prepare.sources.downloads import DATASETS

    if "--in-place" in options:
        return dict.fromkeys(options - _IN_PLACE, "with --in-place, which keeps the shards")
    of_sources = f"for {', '.join(sources)}"
    useless = {
        name: f"without {' or '.join(needed)}"
        for name, needed in _NEEDS.items()
        if options.isdisjoint(needed)
    }
    if not any(map(is_hub_name, sources)):
        useless["--config-name"] = of_sources
    if (DATASETS.keys() - {"digits"}).isdisjoint(sources):
        useless["--root"] = of_sources
    if DATASETS.keys() >= set(sources):
        useless |= dict.fromkeys(("--split", "--image-column", "--label-column"), of_sources)
    if "--labels" in options:
        useless["--class-folder"] = "with --labels"
    if "--no-labels" in options:
        useless |= dict.fromkeys(("--class-folder", "--label-column", "--labels"), "with --no-labels")
    if take == "8-bit":
        useless |= dict.fromkeys(("--bands", "--scale", "--nodata", "--window"), "with --take 8-bit")
    elif "--window" in options:
        useless["--scale"] = "with --window, which sets it"
    return useless


def _prepare(arguments: argparse.Namespace) -> Report:
    """Prepares the sources, or describes shards in place; leaves no empty output folder if that fails."""
    from mae_vit.core.preprocessing import Preprocessing
    from mae_vit.data.prepare.convert import Conversion, default_workers
    from mae_vit.data.prepare.entries import SourceOptions
    from mae_vit.data.prepare.in_place import index_in_place
    from mae_vit.data.prepare.label_files import label_by_file, open_unlabeled
    from mae_vit.data.prepare.masks import pair_masks, read_classes
    from mae_vit.data.prepare.prepare import prepare
    from mae_vit.data.prepare.publish import only_writer
    from mae_vit.data.prepare.selection import Selection
    from mae_vit.data.prepare.sources.find import find_sources

    *specs, out = arguments.paths
    workers = default_workers() if arguments.workers is None else arguments.workers
    anew = arguments.resize is not None or arguments.exif_orientation == "apply"
    how = Preprocessing(
        resize=arguments.resize,
        quality=arguments.quality if anew else None,
        exif_orientation=arguments.exif_orientation,
        bands=arguments.bands,
        window=arguments.window,
    )
    conversion = Conversion(
        how,
        in_place=arguments.in_place,
        scale=arguments.window or arguments.scale,
        nodata=arguments.nodata,
        take=arguments.take,
    )
    asked, arguments.split = arguments.split, arguments.split or "train"
    options = SourceOptions(out=Path(out), **_values(SourceOptions, arguments))
    if arguments.in_place:
        return index_in_place(
            options.out,
            split=arguments.split,
            overwrite=arguments.overwrite,
            conversion=conversion,
            workers=workers,
        )
    with leaving_no_empty_folders(options.out):
        if arguments.label_file:
            plain = replace(options, labels=False, image_column=None, label_column=None)
            sources = [label_by_file(find_sources(specs, plain)[0], arguments.label_file, options)]
        else:
            sources = find_sources(specs, options)
        splits = sorted({entry.split for source in sources for entry in source.entries})
        if asked not in (None, *splits):
            told = f"names or a column of the sources say {', '.join(splits)}"
            raise InputError(f"--split {asked} has no effect: {told}; leave it out, or rename them")
        if arguments.masks:
            segmentation = read_classes(arguments.mask_classes, arguments.mask_ignore)
            sources = [pair_masks(sources[0], arguments.masks, segmentation, partly=arguments.masked_only)]
        selection = Selection(**_values(Selection, arguments))
        if arguments.unlabeled:
            extra = open_unlabeled(arguments.unlabeled, sources, selection, options)
            selection = replace(selection, extra=[extra])
        with only_writer(options.out):
            return prepare(
                sources,
                options.out,
                overwrite=arguments.overwrite,
                shard_bytes=arguments.shard_mib << 20,
                shard_samples=arguments.shard_samples,
                selection=selection,
                conversion=conversion,
                exclude=arguments.exclude or (),
                workers=workers,
            )


def _values(kind: type, arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the values of the options that have the names of a dataclass's fields."""
    return {field.name: getattr(arguments, field.name) for field in fields(kind) if field.name in arguments}
