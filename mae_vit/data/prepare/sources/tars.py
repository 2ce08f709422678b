"""Tars, of which some are shards of samples, some archives of images, and some hold the images of one class."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from mae_vit.core.messages import count_of, plain_text
from mae_vit.core.user_files import split_in
from mae_vit.data.prepare.entries import ImageSource, entries_from_paths
from mae_vit.data.prepare.folder_names import FolderNames, surely_split
from mae_vit.data.prepare.listing import Listing
from mae_vit.data.prepare.sources.archives import Spool, inner_tars, open_archive
from mae_vit.data.prepare.sources.foreign_shards import image_member, is_shard, open_shards, split_of
from mae_vit.data.prepare.sources.parquet_columns import ParquetOptions
from mae_vit.data.shards.dataset_json import FILE_NAME
from mae_vit.data.shards.samples import split_key
from mae_vit.data.shards.tar_headers import Tar

# Names of classes: of WordNet, or words without a number. Others are counted, as shards are.
_FEW_FIELDS = 4
_CLASS = re.compile(r"n\d{8}|[^\d]+")


def open_tars(
    paths: Sequence[Path],
    folder: Path,
    out: Path,
    *,
    split: str,
    name: str,
    columns: ParquetOptions,
    labels: bool,
    names: FolderNames,
) -> ImageSource:
    """Opens tars as one source.

    Args:
        paths: of the tars.
        folder: that holds them all.
        out: the output folder, where compressed ones are decompressed.
        split: of tars whose names tell none.
        name: of the source.
        columns: which fields of samples are images and labels, where the user says so.
        labels: class folders are labels.
        names: how the names of folders and of members are read.

    Raises:
        InputError: if one cannot be used.
    """
    spool = Spool(out)
    tars = [tar for path in paths for tar in _expand(spool.open_tar(path))]
    unnamed = None if columns.image_column else image_member(tars[0])
    columns = replace(columns, image_column=unnamed) if unnamed else columns
    asked = columns.image_column or columns.label_column
    if (folder / FILE_NAME).exists() or asked or any(map(is_shard, tars)):
        source = open_shards(folder, tars, split=split, name=name, columns=columns, labels=labels)
        note = f"took the .{unnamed} members for images, by their first bytes (--image-column)"
        return replace(source, notes=(*source.notes, note)) if unnamed else source
    return _open_archives(tars, folder, split=split, name=name, labels=labels, names=names)


def are_classes(paths: Sequence[Path]) -> bool:
    """Whether tars are called as classes are, so that each may hold the images of one; test_tube is none of splits."""
    stems = {_stem(path) for path in paths}
    several = len({split_in(stem) for stem in stems} - {None}) > 1
    named = all(_CLASS.fullmatch(stem) and not surely_split(stem) for stem in stems)
    return len(stems) > 1 and named and not several


def _stem(path: Path) -> str:
    return path.name.partition(".")[0]


def _expand(tar: Tar) -> list[Tar]:
    """Returns the tars that a tar holds, in tars that it holds too; itself if there are none."""
    inner = inner_tars(tar)
    return [one for found in inner for one in _expand(found)] if inner else [tar]


def _open_archives(
    tars: Sequence[Tar], folder: Path, *, split: str, name: str, labels: bool, names: FolderNames
) -> ImageSource:
    """Lists the images of archives; of several each may be a class, or a part of one data set."""
    stems = [_stem(tar.name) for tar in tars]
    classes = are_classes([tar.name for tar in tars])
    splits = [split_of(tar.name.parent if classes else tar.name, folder, split) for tar in tars]
    own = splits[0] if len(set(splits)) == 1 else None
    files = Listing()
    for tar, stem, of in zip(tars, stems, splits, strict=True):
        found = open_archive(tar, names.encoding)
        # A folder called like its tar is its wrapping.
        wrapped = len(tars) > 1 and all(path.startswith(f"{stem}/") for path, _ in found.images)
        files.add(
            found,
            wrapping=f"{stem}/" if wrapped else "",
            place=("" if own else f"{of}/") + (f"{stem}/" if classes else ""),
        )
    if classes and labels:
        files.notes.append(
            f"took each of {count_of(len(tars), 'tar')} for the class of its name (--no-labels)"
        )
    named = [split_key(path) for path, _ in files.images]
    keys, fields = {key for key, _ in named}, {field for _, field in named}
    if 1 < len(fields) <= _FEW_FIELDS and len(files.images) == len(keys) * len(fields):
        files.notes.append(
            f"took all images of {count_of(len(keys), 'sample')}, which have {len(fields)} each "
            f"({plain_text(', '.join(sorted(fields)))}): --image-column NAME takes one"
        )
    where = str(tars[0].name if len(tars) == 1 else folder)
    return entries_from_paths(
        files,
        own or split,
        where=where,
        name=name,
        labels=labels,
        wrapped=not classes,
        class_folder="first" if classes else names.class_folder,
    )
