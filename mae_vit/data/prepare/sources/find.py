"""Finds the images for `prepare`: a typed source -> a list of entries with random access."""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from glob import glob
from pathlib import Path

from braceexpand import braceexpand

from mae_vit.core.errors import InputError
from mae_vit.core.hub import is_hub_name
from mae_vit.core.messages import closest, closest_path, count_of, nearest
from mae_vit.core.urls import is_url, redact_url
from mae_vit.core.user_files import (
    ARCHIVE_EXTENSIONS,
    ARRAY_EXTENSIONS,
    CONVERTIBLE_EXTENSIONS,
    IMAGE_EXTENSIONS,
    TEXT_EXTENSIONS,
    extension_of,
    full_extension,
    what_file_is,
)
from mae_vit.data.prepare.entries import ImageSource, entries_from_paths
from mae_vit.data.prepare.folder_names import FolderNames
from mae_vit.data.prepare.sources.archives import holds_images, is_tar, open_zip
from mae_vit.data.prepare.sources.downloads import cifar10, cifar100, digits
from mae_vit.data.prepare.sources.folders import open_folder
from mae_vit.data.prepare.sources.foreign_shards import find_shards
from mae_vit.data.prepare.sources.hub_dataset import open_hub_dataset
from mae_vit.data.prepare.sources.parquet import find_parquet, local_files, open_parquet
from mae_vit.data.prepare.sources.parquet_columns import ParquetOptions
from mae_vit.data.prepare.sources.tables import is_table, open_table
from mae_vit.data.prepare.sources.tars import open_tars

_ARCHIVES = (".tar", ".tar.gz", ".tar.bz2", ".tar.xz", ".zip")
_PART = re.compile(r"\.(z\d\d|(zip|7z|rar|tar|tgz|gz)[-_.]?(\d{2,3}|part\w*|[a-z]{2}))$", re.IGNORECASE)
_ARRAYS = re.compile(r"-ubyte(\.gz)?$")  # MNIST's
_CIFAR = re.compile(r"cifar-(100?)-")
# So many pictures may lie beside shards without being the data.
_FEW_IMAGES = 16
DOWNLOADS: dict[str, Callable[[Path], ImageSource]] = {"cifar10": cifar10, "cifar100": cifar100}
_NAMES = ["digits", *DOWNLOADS]
_AS_IT_IS = ParquetOptions()
_ASKING = FolderNames()


def find_sources(
    specs: Sequence[str],
    *,
    out: Path,
    split: str = "train",
    root: Path | None = None,
    labels: bool = True,
    parquet: ParquetOptions = _AS_IT_IS,
    names: FolderNames = _ASKING,
) -> list[ImageSource]:
    """Opens sources of images; Parquet files or tars, which a shell may list one by one, are one source.

    Args:
        specs: each as `find_images` takes it.
        out: the output folder, where temporary files go.
        split: of images outside of split folders.
        root: where torchvision keeps, or puts, its download.
        labels: class folders are labels; False ignores them.
        parquet: columns of Parquet files.
        names: how the names of folders and of archives' members are read.

    Raises:
        InputError: if one is no source, or holds no images.
        FetchUnavailable: if one cannot be fetched now.
    """
    specs = [found for spec in specs for found in _expand(spec)]
    tables, tars = (
        [Path(spec) for spec in specs if is_kind(Path(spec))] for is_kind in (_is_parquet, _is_tar)
    )
    sources = [_not_empty(_parquet(tables, out, split, parquet, labels), str(tables[0]))] if tables else []
    sources += [_not_empty(_tars(tars, out, split, parquet, labels, names), str(tars[0]))] if tars else []
    return sources + [
        find_images(spec, out=out, split=split, root=root, labels=labels, parquet=parquet, names=names)
        for spec in specs
        if Path(spec) not in (*tables, *tars)
    ]


def find_images(
    spec: str,
    *,
    out: Path,
    split: str = "train",
    root: Path | None = None,
    labels: bool = True,
    parquet: ParquetOptions = _AS_IT_IS,
    names: FolderNames = _ASKING,
) -> ImageSource:
    """Opens a source of images.

    Args:
        spec: "digits", "cifar10", "cifar100", a folder of images, of shards or of Parquet files,
            an archive of images, a Parquet file, a table (CSV, TSV), or "hf:USER/NAME[@REVISION]" of the Hub.
        out: the output folder, where temporary files go.
        split: of images outside of split folders.
        root: where torchvision keeps, or puts, its download.
        labels: class folders are labels; False ignores them.
        parquet: columns of Parquet files.
        names: how the names of folders and of archives' members are read.

    Raises:
        InputError: if it is none of these, or holds no images.
        FetchUnavailable: if it cannot be fetched now.
    """
    path = Path(spec)
    lower = path.name.lower()
    if spec == "digits":
        source = digits()
    elif spec in DOWNLOADS:
        source = DOWNLOADS[spec](root) if root else _downloaded(spec, out)
    elif is_hub_name(spec):
        source = open_hub_dataset(spec, out, split=split, options=parquet, labels=labels)
    elif _is_parquet(path):
        source = _parquet([path], out, split, parquet, labels)
    elif path.is_dir():
        source = _from_folder(path, out, split, parquet, labels, names)
    elif _is_tar(path):
        source = _tars([path], out, split, parquet, labels, names)
    elif path.is_file() and lower.endswith(".zip"):
        source = entries_from_paths(
            open_zip(path, names.encoding),
            split,
            where=spec,
            name=path.name,
            labels=labels,
            wrapped=True,
            class_folder=names.class_folder,
        )
    elif is_table(path):
        source = open_table(path, split, parquet, labels=labels)
    elif path.exists():
        raise InputError(f"source {spec}{_no_source(path)}")
    elif is_url(spec):
        raise InputError(
            f"source {redact_url(spec)} lies elsewhere: download it, and give the file or folder here"
        )
    else:
        meant = closest(spec, _NAMES, cutoff=0.6) or closest_path(path) or nearest(spec, _NAMES)
        raise InputError(f"source {spec} does not exist; {meant}")
    return _not_empty(source.without_labels() if not labels else source, spec)


def _no_source(path: Path) -> str:
    """Says why a file is no source, and the way."""
    extension = extension_of(path.name)
    if _PART.search(path.name):
        return ": a part of an archive in several files: join them first (cat ARCHIVE.* > ARCHIVE; zip -s 0 of .z01)"
    if _ARRAYS.search(path.name) or full_extension(path.name) in {*CONVERTIBLE_EXTENSIONS, "npz"}:
        return ": one file of arrays or images, which is not read: write each image as PNG or .npy, and give the folder"
    if extension not in ARCHIVE_EXTENSIONS and (what := what_file_is(path)):
        return f" is {what}"
    if extension in (*TEXT_EXTENSIONS, "xlsx", "xls"):
        return ": a list of images is read as a CSV or TSV, whose first line names its columns, as path,label"
    way = "unpack it first" if extension in ARCHIVE_EXTENSIONS else "of an image, give the folder"
    return f": neither a folder nor an archive ({', '.join(_ARCHIVES)}); {way}"


def _not_empty(source: ImageSource, spec: str) -> ImageSource:
    if not source.entries:
        source.discard()
        notes = "".join(f"; {note}" for note in source.notes)
        if cifar := _CIFAR.match(Path(spec).name):
            root = shlex.quote(str(Path(spec).parent))
            notes += f"; mae-vit prepare cifar{cifar[1]} OUT --root {root} reads it"
        raise InputError(
            f"source {spec} holds no images ({', '.join((*IMAGE_EXTENSIONS, *ARRAY_EXTENSIONS))}){notes}"
        )
    return source


def _from_folder(
    path: Path, out: Path, split: str, parquet: ParquetOptions, labels: bool, names: FolderNames
) -> ImageSource:
    """Opens a folder of images, of shards, or of Parquet files where there are neither."""
    files = open_folder(path)
    # Beside shards lie indexes, which are arrays.
    images = [name for name, _ in files.images if files.extension(name) not in ARRAY_EXTENSIONS]
    shards = find_shards(path) if any(is_tar(Path(name)) for name in files.beside) else []
    if images and shards and not _are_beside(images, shards, path):
        shards = [shard for shard in shards if holds_images(shard)]
        if shards:
            raise InputError(
                f"{path} holds {count_of(len(images), 'image')} ({images[0]}, ...) and "
                f"{count_of(len(shards), 'tar')} of images ({shards[0].relative_to(path)}, ...): which are the "
                "data? Move the others elsewhere, or give the tars themselves as sources"
            )
    if shards:
        if out.exists() and out.samefile(path):
            raise InputError(f"{out} is the source itself: --in-place {path} uses its shards as they are")
        source = _tars(shards, out, split, parquet, labels, names, folder=path)
        if not images:
            return source
        listed = ", ".join(images[:3]) + (", ..." if len(images) > 3 else "")
        note = f"left out {count_of(len(images), 'image')} beside the tars: {listed}"
        return replace(source, notes=(*source.notes, note))
    if not files.images and (tables := find_parquet(path)):
        return _parquet(tables, out, split, parquet, labels, folder=path)
    return entries_from_paths(
        files, split, where=str(path), name=path.name, labels=labels, class_folder=names.class_folder
    )


def _are_beside(images: Sequence[str], shards: Sequence[Path], folder: Path) -> bool:
    """Whether images are but a few pictures in the folders of shards, such as an example."""
    folders = {shard.parent for shard in shards}
    return len(images) <= _FEW_IMAGES and all((folder / image).parent in folders for image in images)


def _is_tar(path: Path) -> bool:
    return is_tar(path) and path.is_file()


def _tars(
    paths: list[Path],
    out: Path,
    split: str,
    columns: ParquetOptions,
    labels: bool,
    names: FolderNames,
    *,
    folder: Path | None = None,
) -> ImageSource:
    """Opens tars: those of a folder, or those that are named."""
    folder, name = _place(paths, folder)
    source = open_tars(
        paths, folder, out, split=split, name=name, columns=columns, labels=labels, names=names
    )
    return source if labels else source.without_labels()


def _place(paths: list[Path], folder: Path | None) -> tuple[Path, str]:
    """The folder that holds files, and a name for them all."""
    if folder is not None:
        return folder, folder.resolve().name
    folder = Path(os.path.commonpath([path.parent for path in paths]))
    return folder, f"{len(paths)} files of {folder.resolve().name}" if len(paths) > 1 else paths[0].name


def _expand(spec: str) -> list[str]:
    """Returns the files that a pattern names, as webdataset writes them: shard-{000..009}.tar, shard-*.tar.

    Raises:
        InputError: if one of them is not there.
    """
    if is_url(spec) or not re.search(r"[{*?\[]", spec) or Path(spec).exists():
        return [spec]
    files = []
    for path in braceexpand(spec):
        found = sorted(glob(path)) if glob(path) else [path] if Path(path).exists() else []
        if not found:
            raise InputError(f"source {spec}: no file is called {path}; of images, give the folder")
        files += found
    return files


def _is_parquet(path: Path) -> bool:
    return path.name.lower().endswith(".parquet") and path.is_file()


def _parquet(
    paths: list[Path],
    out: Path,
    split: str,
    options: ParquetOptions,
    labels: bool,
    *,
    folder: Path | None = None,
) -> ImageSource:
    """Opens Parquet files: those of a folder, or those that are named."""
    found = folder is not None
    folder, name = _place(paths, folder)
    files = local_files(paths, folder, split)
    twins: dict[tuple[str, str], str] = {}
    for file in files if found else ():
        place, _, own = file.name.rpartition("/")
        if (other := twins.setdefault((file.split, own), place)) != place:
            raise InputError(
                f"{folder}: {other or '.'} and {place or '.'} hold files of one name, {own}: of a data set in several "
                "configurations, give the folder of one; of parts of one, give the files as sources"
            )
    return open_parquet(files, out, name=name, options=options, labels=labels)


def _downloaded(spec: str, out: Path) -> ImageSource:
    """Downloads into a hidden folder of `out`, kept for the next call; a failure leaves nothing."""
    folder = out / ".download"
    try:
        return DOWNLOADS[spec](folder)
    except InputError:
        shutil.rmtree(folder, ignore_errors=True)
        raise
