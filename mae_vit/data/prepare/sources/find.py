"""Finds the images for `prepare`: a typed source -> a list of entries with random access."""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from glob import glob
from pathlib import Path

from braceexpand import braceexpand

from mae_vit.core.errors import InputError
from mae_vit.core.hub import is_hub_name
from mae_vit.core.messages import closest, closest_path, count_of, nearest, plain_text
from mae_vit.core.urls import is_url, redact_url
from mae_vit.core.user_files import (
    ARCHIVE_EXTENSIONS,
    ARRAY_EXTENSIONS,
    CONVERTIBLE_EXTENSIONS,
    EACH_IMAGE,
    IMAGE_EXTENSIONS,
    TEXT_EXTENSIONS,
    extension_of,
    full_extension,
    split_from_path,
    what_file_is,
)
from mae_vit.data.prepare.entries import ImageSource, SourceOptions
from mae_vit.data.prepare.listing import Listing, shown
from mae_vit.data.prepare.path_entries import entries_from_paths
from mae_vit.data.prepare.sources.archives import holds_images, is_tar, open_zip
from mae_vit.data.prepare.sources.downloads import cifar10, cifar100, digits
from mae_vit.data.prepare.sources.folders import open_folder
from mae_vit.data.prepare.sources.foreign_shards import find_shards
from mae_vit.data.prepare.sources.rows import find_parquet, open_hub_dataset, open_parquet
from mae_vit.data.prepare.sources.tables import is_table, open_table
from mae_vit.data.prepare.sources.tars import open_tars

_ARCHIVES = (".tar", ".tar.gz", ".tar.bz2", ".tar.xz", ".zip")
_PART = re.compile(r"\.(z\d\d|(zip|7z|rar|tar|tgz|gz)[-_.]?(\d{2,3}|part\w*|[a-z]{2}))$", re.IGNORECASE)
_NUMBERS = re.compile(r"\d+")
_CIFAR = re.compile(r"cifar-(100?)-")
# So many pictures may lie beside shards without being the data.
_FEW_IMAGES = 16
DOWNLOADS: dict[str, Callable[[Path], ImageSource]] = {"cifar10": cifar10, "cifar100": cifar100}
_NAMES = ["digits", *DOWNLOADS]


def find_sources(specs: Sequence[str], options: SourceOptions) -> list[ImageSource]:
    """Opens sources of images; Parquet files or tars, which a shell may list one by one, are one source.

    So are zips whose names differ in numbers alone, as those of a large download do.

    Args:
        specs: each as `find_images` takes it.
        options: of all of them.

    Raises:
        InputError: if one is no source, or holds no images.
        FetchUnavailable: if one cannot be fetched now.
    """
    specs = [path for spec in specs for path in _expand(spec)]
    sources = list[ImageSource]()
    zips = {_NUMBERS.sub("", Path(spec).name) for spec in specs if _is_zip(Path(spec))}
    kinds: list[tuple[Callable[[Path], bool], Callable[[list[Path], SourceOptions], ImageSource]]]
    kinds = [(_is_parquet, _open_parquet), (_is_tar, _open_tars)]
    kinds += [(partial(_is_zip, name=name), _open_zips) for name in sorted(zips)]
    for is_kind, open_files in kinds:
        if paths := [Path(spec) for spec in specs if is_kind(Path(spec))]:
            sources.append(_checked(open_files(paths, options), str(paths[0]), options))
            specs = [spec for spec in specs if Path(spec) not in paths]
    return sources + [_open_source(spec, options) for spec in specs]


def find_images(
    spec: str,
    *,
    out: Path,
    split: str = "train",
    root: Path | None = None,
    labels: bool = True,
    class_folder: str | None = None,
) -> ImageSource:
    """Opens a source of images.

    Args:
        spec: "digits", "cifar10", "cifar100", a folder of images, of shards or of Parquet files,
            an archive of images, a Parquet file, a table (CSV, TSV), or "hf:USER/NAME[@REVISION]" of the Hub.
        out: see `SourceOptions`, as the other arguments.
        split: of images outside of split folders.
        root: of torchvision's downloads.
        labels: whether labels are read.
        class_folder: "first", "last" or None.

    Raises:
        InputError: if it is none of these, or holds no images.
        FetchUnavailable: if it cannot be fetched now.
    """
    return _open_source(
        spec, SourceOptions(out=out, split=split, root=root, labels=labels, class_folder=class_folder)
    )


def _open_source(spec: str, options: SourceOptions) -> ImageSource:
    path = Path(spec)
    if spec == "digits":
        source = digits()
    elif spec in DOWNLOADS:
        source = _download(spec, options)
    elif is_hub_name(spec):
        source = open_hub_dataset(spec, options)
    elif path.is_dir():
        source = _open_folder(path, options)
    elif _is_parquet(path):
        source = _open_parquet([path], options)
    elif _is_tar(path):
        source = _open_tars([path], options)
    elif _is_zip(path):
        source = _open_zips([path], options)
    elif is_table(path):
        source = open_table(path, options)
    else:
        raise InputError(_no_source(spec, path))
    return _checked(source, spec, options)


def _no_source(spec: str, path: Path) -> str:
    """Says why a source is none, and the remedy."""
    if not path.exists():
        if is_url(spec):
            return f"source {redact_url(spec)} lies elsewhere: download it, and give the file or folder here"
        meant = closest(spec, _NAMES, cutoff=0.6) or closest_path(path) or nearest(spec, _NAMES)
        return f"source {spec} does not exist; {meant}"
    extension = extension_of(path.name)
    archive = extension in ARCHIVE_EXTENSIONS
    if _PART.search(path.name):
        why = ": a part of an archive in several files: join them first (cat ARCHIVE.* > ARCHIVE; zip -s 0 of .z01)"
    elif full_extension(path.name) in {*CONVERTIBLE_EXTENSIONS, "npz"}:
        why = f": one file of arrays or images, which is not read: {EACH_IMAGE}"
    elif not archive and (what := what_file_is(path)):
        why = f" is {what}"
    elif extension in (*TEXT_EXTENSIONS, "xlsx", "xls"):
        why = ": a list of images is read as a CSV or TSV, whose first line names its columns, as path,label"
    else:
        way = "unpack it first" if archive else "of an image, give the folder"
        why = f": neither a folder nor an archive ({', '.join(_ARCHIVES)}); {way}"
    return f"source {spec}{why}"


def _checked(source: ImageSource, spec: str, options: SourceOptions) -> ImageSource:
    """Refuses a source without images; takes off labels that are not wanted."""
    if not source.entries:
        notes = "".join(f"; {note}" for note in source.notes)
        if cifar := _CIFAR.match(Path(spec).name):
            root = shlex.quote(str(Path(spec).parent))
            notes += f"; mae-vit prepare cifar{cifar[1]} OUT --root {root} reads it"
        raise InputError(
            f"source {spec} holds no images ({', '.join((*IMAGE_EXTENSIONS, *ARRAY_EXTENSIONS))}){notes}"
        )
    if options.labels:
        return source
    return replace(
        source, entries=[replace(entry, class_name=None) for entry in source.entries], classes=None
    )


def _open_folder(path: Path, options: SourceOptions) -> ImageSource:
    """Opens a folder of images, of shards, or of Parquet files where there are neither."""
    files = open_folder(path)
    # Beside shards lie indexes, which are arrays.
    images = [name for name, _ in files.images if files.extension(name) not in ARRAY_EXTENSIONS]
    shards = find_shards(path) if any(is_tar(Path(name)) for name in files.beside) else []
    folders = {shard.parent for shard in shards}
    example = len(images) <= _FEW_IMAGES and all((path / image).parent in folders for image in images)
    if images and shards and not example:
        shards = [shard for shard in shards if holds_images(shard)]
        if shards:
            raise InputError(
                f"{path} holds {count_of(len(images), 'image')} ({images[0]}, ...) and "
                f"{count_of(len(shards), 'tar')} of images ({shards[0].relative_to(path)}, ...): which are the "
                "data? Move the others elsewhere, or give the tars themselves as sources"
            )
    if shards:
        if options.out.exists() and options.out.samefile(path):
            raise InputError(
                f"{options.out} is the source itself: --in-place {path} uses its shards as they are"
            )
        source = _open_tars(shards, options, folder=path)
        note = f"left out {count_of(len(images), 'image')} beside the tars: {shown(images)}"
        return replace(source, notes=(*source.notes, note)) if images else source
    if not files.images and (tables := find_parquet(path)):
        return _open_parquet(tables, options, folder=path)
    return entries_from_paths(files, options, where=str(path), name=path.name)


def _open_tars(paths: list[Path], options: SourceOptions, folder: Path | None = None) -> ImageSource:
    """Opens tars: those of a folder, or those that are named."""
    folder, name = _folder_and_name(paths, folder)
    return open_tars(paths, folder, name, options)


def _open_zips(paths: list[Path], options: SourceOptions) -> ImageSource:
    """Opens a zip, or the parts of a folder that was packed into several, as one folder."""
    folder, name = _folder_and_name(paths, None)
    files, holder = Listing(), dict[str, Path]()
    for path in paths:
        part = open_zip(path, options.name_encoding)
        if both := next((image for image, _ in part.images if image in holder), None):
            raise InputError(
                f"{holder[both]} and {path} both hold {plain_text(both)}: give one, or unpack each into a folder of "
                "its own"
            )
        holder |= dict.fromkeys((image for image, _ in part.images), path)
        files.add(part, wrapping="", place="")
    files.images.sort(key=lambda image: image[0])
    where = str(paths[0] if len(paths) == 1 else folder)
    return entries_from_paths(files, options, where=where, name=name, wrapped=True)


def _open_parquet(paths: list[Path], options: SourceOptions, folder: Path | None = None) -> ImageSource:
    """Opens Parquet files: those of a folder, or those that are named."""
    if folder is not None:
        _check_one_configuration(paths, folder, options.split)
    folder, name = _folder_and_name(paths, folder)
    return open_parquet(paths, folder, name, options)


def _check_one_configuration(paths: Sequence[Path], folder: Path, split: str) -> None:
    parents: dict[tuple[str, str], Path] = {}
    for path in paths:
        own = split_from_path(path, folder, split), path.name
        if (other := parents.setdefault(own, path.parent)) != path.parent:
            raise InputError(
                f"{folder}: {other.relative_to(folder)} and {path.parent.relative_to(folder)} hold files of one name, "
                f"{path.name}: of a data set in several configurations, give the folder of one; of parts of one, give "
                "the files as sources"
            )


def _folder_and_name(paths: list[Path], folder: Path | None) -> tuple[Path, str]:
    """The folder that holds files, and a name for them all."""
    if folder is not None:
        return folder, folder.resolve().name
    folder = Path(os.path.commonpath([path.parent for path in paths]))
    return folder, f"{len(paths)} files of {folder.resolve().name}" if len(paths) > 1 else paths[0].name


def _is_tar(path: Path) -> bool:
    return is_tar(path) and path.is_file()


def _is_zip(path: Path, name: str | None = None) -> bool:
    """Whether a file is a zip; called so, but for numbers."""
    named = name in (None, _NUMBERS.sub("", path.name))
    return named and extension_of(path.name) == "zip" and path.is_file()


def _is_parquet(path: Path) -> bool:
    return extension_of(path.name) == "parquet" and path.is_file()


def _expand(spec: str) -> list[str]:
    """Returns the files that a pattern names, as webdataset writes them: shard-{000..009}.tar, shard-*.tar.

    Raises:
        InputError: if one of them is not there.
    """
    if is_url(spec) or not re.search(r"[{*?\[]", spec) or Path(spec).exists():
        return [spec]
    files = []
    for path in braceexpand(spec):
        matching = sorted(glob(path)) or [path]
        if not os.path.exists(matching[0]):
            raise InputError(f"source {spec}: no file is called {path}; of images, give the folder")
        files += matching
    return files


def _download(name: str, options: SourceOptions) -> ImageSource:
    """Downloads into a hidden folder of the output, kept for the next call; a failure leaves nothing."""
    folder = options.root or options.out / ".download"
    try:
        return DOWNLOADS[name](folder)
    except InputError:
        if options.root is None:
            shutil.rmtree(folder, ignore_errors=True)
        raise
