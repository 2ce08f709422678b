"""Finds the images for `prepare`: a typed source -> a list of entries with random access."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from mae_vit.core.errors import InputError
from mae_vit.core.hub import is_hub_name
from mae_vit.core.messages import closest, closest_path, count_of, nearest
from mae_vit.core.user_files import ARCHIVE_EXTENSIONS, ARRAY_EXTENSIONS, IMAGE_EXTENSIONS, extension_of
from mae_vit.data.prepare.entries import ImageSource, entries_from_paths
from mae_vit.data.prepare.folder_names import FolderNames
from mae_vit.data.prepare.sources.archives import open_archive, open_zip
from mae_vit.data.prepare.sources.downloads import cifar10, cifar100, digits
from mae_vit.data.prepare.sources.folders import open_folder
from mae_vit.data.prepare.sources.foreign_shards import find_shards, holds_labels, open_shards
from mae_vit.data.prepare.sources.hub_dataset import open_hub_dataset
from mae_vit.data.prepare.sources.parquet import find_parquet, local_files, open_parquet
from mae_vit.data.prepare.sources.parquet_columns import ParquetOptions

_TARS = (".tar", ".tar.gz", ".tgz")
_ARCHIVES = (*_TARS, ".zip")
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
    """Opens sources of images; Parquet files, which a shell may list one by one, are one source.

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
    files = [Path(spec) for spec in specs if _is_parquet(Path(spec))]
    sources = [_not_empty(_parquet(files, out, split, parquet, labels), str(files[0]))] if files else []
    return sources + [
        find_images(spec, out=out, split=split, root=root, labels=labels, parquet=parquet, names=names)
        for spec in specs
        if Path(spec) not in files
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
            an archive of images, a Parquet file, or "hf:USER/NAME[@REVISION]" of the Hub.
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
    elif path.is_file() and lower.endswith(_TARS):
        if lower.endswith(".tar") and holds_labels(path):
            source = open_shards(path.parent, [path], split=split, name=path.name)
        else:
            source = entries_from_paths(
                open_archive(path, out, names.encoding),
                split,
                where=spec,
                name=path.name,
                labels=labels,
                wrapped=True,
                class_folder=names.class_folder,
            )
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
    elif path.exists():
        unpack = extension_of(path.name) in ARCHIVE_EXTENSIONS
        raise InputError(
            f"source {spec}: neither a folder nor an archive ({', '.join(_ARCHIVES)}); "
            f"{'unpack it first' if unpack else 'of an image, give the folder'}"
        )
    elif any(mark in spec for mark in "*?["):
        raise InputError(
            f"source {spec}: no file is called so, and patterns are not expanded; give the folder"
        )
    else:
        meant = closest(spec, _NAMES, cutoff=0.6) or closest_path(path) or nearest(spec, _NAMES)
        raise InputError(f"source {spec} does not exist; {meant}")
    return _not_empty(source.without_labels() if not labels else source, spec)


def _not_empty(source: ImageSource, spec: str) -> ImageSource:
    if not source.entries:
        source.discard()
        notes = "".join(f"; {note}" for note in source.notes)
        raise InputError(
            f"source {spec} holds no images ({', '.join((*IMAGE_EXTENSIONS, *ARRAY_EXTENSIONS))}){notes}"
        )
    return source


def _from_folder(
    path: Path, out: Path, split: str, parquet: ParquetOptions, labels: bool, names: FolderNames
) -> ImageSource:
    """Opens a folder of images; of shards where there are none; of Parquet files where there are neither."""
    files = open_folder(path)
    # Beside shards lie indexes, which are arrays.
    if all(files.extension(name) in ARRAY_EXTENSIONS for name, _ in files.images) and (
        shards := find_shards(path)
    ):
        if out.exists() and out.samefile(path):
            raise InputError(f"{out} is the source itself: --in-place {path} uses its shards as they are")
        return open_shards(path, shards, split=split, name=path.resolve().name)
    if not files.images and (tables := find_parquet(path)):
        return _parquet(tables, out, split, parquet, labels, folder=path)
    return entries_from_paths(
        files, split, where=str(path), name=path.name, labels=labels, class_folder=names.class_folder
    )


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
    name = folder.resolve().name if folder else paths[0].name
    if folder is None:
        folder = Path(os.path.commonpath([path.parent for path in paths]))
        name = f"{count_of(len(paths), 'file')} of {folder.resolve().name}" if len(paths) > 1 else name
    files = local_files(paths, folder, split)
    return open_parquet(files, out, name=name, options=options, labels=labels)


def _downloaded(spec: str, out: Path) -> ImageSource:
    """Downloads into a hidden folder of `out`, kept for the next call; a failure leaves nothing."""
    folder, was_there = out / ".download", out.exists()
    try:
        return DOWNLOADS[spec](folder)
    except InputError:
        shutil.rmtree(folder, ignore_errors=True)
        if not was_there:
            with suppress(OSError):
                out.rmdir()
        raise
