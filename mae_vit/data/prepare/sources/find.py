"""Opens the sources of `prepare`: a name or path becomes a list of entries with random access."""

from __future__ import annotations

import os
import re
import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from glob import glob
from pathlib import Path
from typing import Any

from braceexpand import braceexpand

from mae_vit.core import user_files
from mae_vit.core.errors import InputError
from mae_vit.core.hub import is_hub_name
from mae_vit.core.messages import closest, closest_path, count_of, plain_text
from mae_vit.core.urls import is_url, redact_url
from mae_vit.data.prepare.entries import ImageSource, SourceOptions
from mae_vit.data.prepare.folder_names import surely_split
from mae_vit.data.prepare.listing import ARCHIVE_PART, JOIN_PARTS, Listing, shown
from mae_vit.data.prepare.sources.archives import (
    Spool,
    holds_images,
    inner_tars,
    is_tar,
    open_archive,
    open_tar,
    open_zip,
)
from mae_vit.data.prepare.sources.downloads import DATASETS
from mae_vit.data.prepare.sources.folders import entries_from_paths, open_folder
from mae_vit.data.prepare.sources.foreign_shards import find_shards, image_member, is_shard, open_shards
from mae_vit.data.prepare.sources.rows import holds_image_column, open_hub_dataset, open_parquet
from mae_vit.data.prepare.sources.tables import is_table, open_table
from mae_vit.data.shards.dataset_json import FILE_NAME, read_dataset
from mae_vit.data.shards.samples import split_key
from mae_vit.data.shards.tar_headers import Tar

_SOURCES = "a folder, .tar, .tar.gz, .tar.bz2, .tar.xz, .zip, .parquet, a CSV or TSV of paths and labels"
_CIFAR = re.compile(r"cifar-(100?)-")
# Largest number of images beside shards that are only examples.
_FEW_IMAGES = 16
_FEW_FIELDS = 4
# Names of classes: WordNet ids, or words without a number. Names with other numbers are those of shards.
_CLASS = re.compile(r"n\d{8}|[^\d]+")


def find_sources(specs: Sequence[str], options: SourceOptions) -> list[ImageSource]:
    """Opens sources of images; several Parquet files, tars or zips, as from a shell's pattern, are one source.

    Raises:
        InputError: if a spec is no source, or holds no images.
        FetchUnavailable: if a source cannot be fetched now.
    """
    groups: dict[str, list[str]] = {}
    paths = [path for spec in specs for path in _expand(spec)]
    for number, path in enumerate(paths):
        groups.setdefault(_file_kind(Path(path)) or str(number), []).append(path)
    out = options.out.resolve()
    for folder in map(Path, paths):
        # A hidden folder is no part of the source.
        if (real := folder.resolve()) in out.parents and not user_files.is_hidden(str(out.relative_to(real))):
            raise InputError(f"the output {options.out} lies in the source {folder}; give another folder")
    sources = [_open(group, options) for group in groups.values()]
    if (options.image_column or options.label_column) and not any(source.has_columns for source in sources):
        raise InputError(f"{specs[0]} has images and no columns; leave --image-column and --label-column out")
    return sources


def find_images(spec: str, out: Path, **options: Any) -> ImageSource:
    """Opens one source; `options` are those of `SourceOptions`.

    Raises:
        InputError: if it is no source, or holds no images.
        FetchUnavailable: if it cannot be fetched now.
    """
    return _open([spec], SourceOptions(out=out, **options))


@contextmanager
def naming_prepare(source: str | Path) -> Iterator[None]:
    """Says whose options an error names, for commands that have none of them."""
    try:
        yield
    except InputError as error:
        command = f" (options of `mae-vit prepare {shlex.quote(str(source))} OUT`; then give OUT)"
        raise InputError(f"{error}{command * (' --' in str(error))}") from None


def _file_kind(path: Path) -> str | None:
    """Returns the kind of a file (tar, zip, parquet), if several such files may be one source; else None."""
    extension = user_files.extension_of(path.name)
    kind = "tar" if is_tar(path) else extension if extension in ("parquet", "zip") else None
    return kind if kind and path.is_file() else None


def _open(specs: list[str], options: SourceOptions) -> ImageSource:
    """Opens a source, or several files that are one; rejects a source without images."""
    spec, paths = specs[0], [Path(spec) for spec in specs]
    kind = _file_kind(paths[0])
    if spec in DATASETS:
        source = DATASETS[spec](options)
        if paths[0].exists():
            note = f"{spec} is the data set of that name; ./{spec} is the folder"
            source = replace(source, notes=(*source.notes, note))
    elif is_hub_name(spec):
        source = open_hub_dataset(spec, options)
    elif all((paths[0] / name).is_file() for name in ("config.yaml", "environment.json")):
        raise InputError(
            f"{spec} is a run, whose images are pictures of its results; give the images themselves"
        )
    elif paths[0].is_dir():
        source = _open_folder(paths[0], options)
    elif kind == "zip":
        zips = [(path, open_zip(path)) for path in paths]
        source = _open_archives(zips, *_folder_and_name(paths), options)
    elif kind:
        source = (open_tars if kind == "tar" else open_parquet)(paths, *_folder_and_name(paths), options)
    elif is_table(paths[0]):
        source = open_table(paths[0], options)
    else:
        raise InputError(_no_source(spec, paths[0]))
    if not source.entries:
        notes = "".join(f"; {note}" for note in source.notes)
        if cifar := _CIFAR.match(paths[0].name):
            root = shlex.quote(str(paths[0].parent))
            notes += f"; mae-vit prepare cifar{cifar[1]} OUT --root {root} reads it"
        kinds = ", ".join(user_files.READ_EXTENSIONS)
        raise InputError(f"source {spec} contains no images ({kinds}){notes}")
    if options.labels:
        return source
    entries = [replace(entry, class_name=None) for entry in source.entries]
    return replace(source, entries=entries, classes=None)


def _no_source(spec: str, path: Path) -> str:
    """Explains why a path is no source, and the remedy."""
    if not path.exists():
        if is_url(spec):
            return f"source {redact_url(spec)} is remote; download it, and give the local file or folder"
        known = f"data sets known by name: {', '.join(sorted(DATASETS))}"
        meant = closest(spec, DATASETS, cutoff=0.6) or closest_path(path) or known
        return f"source {spec} does not exist: there is no such file or folder; {meant}"
    if ARCHIVE_PART.search(path.name):
        return f"source {spec} is a part of an archive; {JOIN_PARTS}"
    if user_files.full_extension(path.name) in {*user_files.CONVERTIBLE_EXTENSIONS, "npz"}:
        return f"source {spec} has many images in one file, which is not supported; {user_files.EACH_IMAGE}"
    if user_files.extension_of(path.name) in (*user_files.TABLE_EXTENSIONS, "json"):
        return f"source {spec} is a table of an unsupported kind; write its paths and labels to a CSV or TSV"
    what = user_files.what_file_is(path)
    return f"source {spec} is {what or f'not supported; give {_SOURCES}, and unpack other archives first'}"


def _open_folder(path: Path, options: SourceOptions) -> ImageSource:
    """Opens a folder of images or of shards or, if there are neither, of Parquet files."""
    files = open_folder(path)
    # Without arrays, since the indexes beside shards are arrays.
    images = [name for name, _ in files.images if files.extension(name) not in user_files.ARRAY_EXTENSIONS]
    described = not images and _is_prepared(path)
    shards = find_shards(path) if described or any(is_tar(Path(name)) for name in files.beside) else []
    parquet = (file for file in files.left_out if user_files.extension_of(file) == "parquet")
    tables = sorted(path / file for file in parquet if not user_files.is_hidden(file))
    if files.images:
        tables = [table for table in tables if images and holds_image_column(table)]
    kind, packed = ("tar", shards) if shards else ("Parquet file", tables)
    folders = {(path / image).parent for image in images}
    example = folders <= {file.parent for file in packed} or (len(folders) == 1 and packed == tables)
    if images and not (example and len(images) <= _FEW_IMAGES):
        packed = [file for file in packed if file in tables or holds_images(file)]
        if packed:
            raise InputError(
                f"{path} contains {count_of(len(images), 'image')} ({images[0]}, ...) and "
                f"{count_of(len(packed), kind)} of images ({packed[0].relative_to(path)}, ...); move away those that "
                f"are not the data, or give the {kind}s as sources"
            )
    inner = [
        str(folder) for folder in sorted({tar.parent for tar in shards} - {path}) if _is_prepared(folder)
    ]
    if inner:
        raise InputError(f"{path} is not prepared, but has prepared data in it; give one of {shown(inner)}")
    name = path.resolve().name
    if not packed:
        return entries_from_paths(files, options, where=str(path), name=path.name)
    if shards:
        if options.out.exists() and options.out.samefile(path):
            raise InputError(
                f"{path} is both source and output; --in-place {path} uses its shards as they are"
            )
        source = open_tars(shards, path, name, options)
    else:
        _check_one_configuration(tables, path, options.split)
        source = open_parquet(tables, path, name, options)
    note = f"left out {count_of(len(images), 'image')} next to the {kind}s: {shown(images)}"
    left_out = dict.fromkeys(images, f"next to the {kind}s")
    return replace(source, notes=(*source.notes, note), left_out=left_out) if images else source


def _is_prepared(folder: Path) -> bool:
    with suppress(InputError):  # other tools write a dataset.json, too
        return bool(read_dataset(folder))
    return False


def _check_one_configuration(paths: Sequence[Path], folder: Path, split: str) -> None:
    parents: dict[tuple[str, str], Path] = {}
    for path in paths:
        own = user_files.split_from_path(path, folder, split), path.name
        if (other := parents.setdefault(own, path.parent)) != path.parent:
            raise InputError(
                f"{folder}: {other.relative_to(folder)} and {path.parent.relative_to(folder)} both contain "
                f"{path.name}; give the folder of one configuration, or the files themselves if they are parts of one "
                "data set"
            )


def _folder_and_name(paths: list[Path]) -> tuple[Path, str]:
    """Returns the folder that holds all files, and a name for them."""
    folder = Path(os.path.commonpath([path.parent for path in paths]))
    return folder, f"{len(paths)} files of {folder.resolve().name}" if len(paths) > 1 else paths[0].name


def _expand(spec: str) -> list[str]:
    """Expands a pattern in the syntax of webdataset: shard-{000..009}.tar, shard-*.tar.

    Raises:
        InputError: if a file does not exist.
    """
    if is_url(spec) or not re.search(r"[{*?\[]", spec) or Path(spec).exists():
        return [spec]
    files = []
    for path in braceexpand(spec) if spec.count("{") == spec.count("}") else [spec]:
        matching = sorted(glob(path)) or [path]
        if not os.path.exists(matching[0]):
            raise InputError(f"source {spec}: there is no {path}; give the folder of the images")
        files += matching
    return files


def open_tars(paths: Sequence[Path], folder: Path, name: str, options: SourceOptions) -> ImageSource:
    """Opens tars as one source, which `folder` holds; raises InputError if one cannot be used."""
    spool = Spool(options.out)
    tars = [inner for path in paths for inner in _opened(open_tar(path, spool))]
    unnamed = None if options.image_column else image_member(tars[0])
    options = replace(options, image_column=unnamed or options.image_column)
    asked = options.image_column or options.label_column
    if (folder / FILE_NAME).exists() or asked or any(map(is_shard, tars)):
        source = open_shards(folder, tars, name, options)
        note = f"read the .{unnamed} members as images, by their first bytes (--image-column)"
        return replace(source, notes=(*source.notes, note)) if unnamed else source
    source = _open_archives([(tar.name, open_archive(tar)) for tar in tars], folder, name, options)
    parts = [split_key(entry.path) for entry in source.entries]
    keys, fields = {key for key, _ in parts}, {field for _, field in parts}
    # cat.0.jpg, cat.1.jpg are names with dots.
    named = not all(field.partition(".")[0].isdigit() for field in fields)
    if named and 1 < len(fields) <= _FEW_FIELDS and len(parts) == len(keys) * len(fields):
        note = (
            f"read all images of {count_of(len(keys), 'sample')}, {len(fields)} each "
            f"({plain_text(', '.join(sorted(fields)))}); --image-column NAME chooses one"
        )
        source = replace(source, notes=(*source.notes, note))
    return source


def _opened(tar: Tar) -> list[Tar]:
    """Returns the tars inside a tar, at any depth; itself if there are none."""
    inner = inner_tars(tar)
    return [tar for outer in inner for tar in _opened(outer)] if inner else [tar]


def _open_archives(
    archives: Sequence[tuple[Path, Listing]], folder: Path, name: str, options: SourceOptions
) -> ImageSource:
    """Joins the images of archives; each of several may be a class, or a part of one data set."""
    stems = [path.name.partition(".")[0] for path, _ in archives]
    # Names of classes: test_tube is one, not a split.
    named = all(_CLASS.fullmatch(stem) and not surely_split(stem) for stem in stems)
    of_splits = {user_files.split_and_rest(stem)[0] for stem in stems} - {None}
    classes = named and len(set(stems)) > 1 and len(of_splits) < 2
    zips = _file_kind(archives[0][0]) == "zip"
    splits = [
        user_files.split_from_path(
            path.parent if classes else path, folder, surely_split(stem) or options.split
        )
        for (path, _), stem in zip(archives, stems, strict=True)
    ]
    if zips and len(archives) == 1:  # photos-dev.zip may be anything
        splits = [user_files.split_named(stems[0]) or options.split]
    one_split = len(set(splits)) == 1
    files = Listing()
    for (_, listing), stem, split in zip(archives, stems, splits, strict=True):
        # A folder with the name of its archive is its wrapper.
        wrapped = len(archives) > 1 and all(image.startswith(f"{stem}/") for image, _ in listing.images)
        below = ("" if one_split else f"{split}/") + (f"{stem}/" if classes else "")
        files.add(listing, wrapping=f"{stem}/" if wrapped else "", folder=below)
    twice = [image for image, count in Counter(image for image, _ in files.images).items() if count > 1]
    # Shards repeat names; zips are parts of one folder.
    if twice and zips:
        raise InputError(
            f"several zips of {folder} contain {twice[0]}; give one of them, or unpack each into a folder of its own"
        )
    if classes and options.labels:
        files.notes.append(
            f"read each of {count_of(len(archives), 'archive')} as the class of its name (--no-labels)"
        )
    # Folders in them may be the classes, if not 2019.
    inner = {name for image, _ in files.images for name in image.split("/")[2 - one_split : -1]}
    flat = not any(map(_CLASS.fullmatch, inner))
    options = replace(
        options,
        split=splits[0] if one_split else options.split,
        class_folder="first" if classes and flat else options.class_folder,
    )
    where = str(archives[0][0] if len(archives) == 1 else folder)
    return entries_from_paths(files, options, where=where, name=name, wrapped=not classes)
