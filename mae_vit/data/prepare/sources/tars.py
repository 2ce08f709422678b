"""Opens tars: shards of samples, archives of images, or tars that each hold the images of one class."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from mae_vit.core.messages import count_of, plain_text
from mae_vit.core.user_files import split_and_rest, split_from_path
from mae_vit.data.prepare.entries import ImageSource, SourceOptions
from mae_vit.data.prepare.folder_names import surely_split
from mae_vit.data.prepare.listing import Listing
from mae_vit.data.prepare.path_entries import entries_from_paths
from mae_vit.data.prepare.sources.archives import inner_tars, open_archive, open_tar
from mae_vit.data.prepare.sources.foreign_shards import image_member, is_shard, open_shards
from mae_vit.data.prepare.sources.spool import Spool
from mae_vit.data.shards.dataset_json import FILE_NAME
from mae_vit.data.shards.samples import split_key
from mae_vit.data.shards.tar_headers import Tar

_FEW_FIELDS = 4
# Names of classes: WordNet ids, or words without a number. Names with other numbers are those of shards.
_CLASS = re.compile(r"n\d{8}|[^\d]+")


def open_tars(paths: Sequence[Path], folder: Path, name: str, options: SourceOptions) -> ImageSource:
    """Opens tars as one source, which `folder` holds.

    Raises:
        InputError: if one cannot be used.
    """
    spool = Spool(options.out)
    tars = [inner for path in paths for inner in _expand(open_tar(path, spool))]
    unnamed = None if options.image_column else image_member(tars[0])
    options = replace(options, image_column=unnamed or options.image_column)
    asked = options.image_column or options.label_column
    if (folder / FILE_NAME).exists() or asked or any(map(is_shard, tars)):
        source = open_shards(folder, tars, name, options)
        note = f"took the .{unnamed} members for images, by their first bytes (--image-column)"
        return replace(source, notes=(*source.notes, note)) if unnamed else source
    return _open_archives(tars, folder, name, options)


def are_classes(paths: Sequence[Path]) -> bool:
    """Whether tars have the names of classes, so that each may hold one class; test_tube is a class, not a split."""
    stems = {_stem(path) for path in paths}
    several = len({split_and_rest(stem)[0] for stem in stems} - {None}) > 1
    named = all(_CLASS.fullmatch(stem) and not surely_split(stem) for stem in stems)
    return len(stems) > 1 and named and not several


def _stem(path: Path) -> str:
    return path.name.partition(".")[0]


def _expand(tar: Tar) -> list[Tar]:
    """Returns the tars inside a tar, at any depth; itself if there are none."""
    inner = inner_tars(tar)
    return [tar for outer in inner for tar in _expand(outer)] if inner else [tar]


def _open_archives(tars: Sequence[Tar], folder: Path, name: str, options: SourceOptions) -> ImageSource:
    """Lists the images of archives; each of several may be a class, or a part of one data set."""
    classes = are_classes([tar.name for tar in tars])
    splits = [
        split_from_path(tar.name.parent if classes else tar.name, folder, options.split) for tar in tars
    ]
    one_split = len(set(splits)) == 1
    files = Listing()
    for tar, split in zip(tars, splits, strict=True):
        listing, stem = open_archive(tar, options.name_encoding), _stem(tar.name)
        # A folder with the name of its tar is its wrapper.
        wrapped = len(tars) > 1 and all(path.startswith(f"{stem}/") for path, _ in listing.images)
        below = ("" if one_split else f"{split}/") + (f"{stem}/" if classes else "")
        files.add(listing, wrapping=f"{stem}/" if wrapped else "", folder=below)
    if classes and options.labels:
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
    options = replace(
        options,
        split=splits[0] if one_split else options.split,
        class_folder="first" if classes else options.class_folder,
    )
    where = str(tars[0].name if len(tars) == 1 else folder)
    return entries_from_paths(files, options, where=where, name=name, wrapped=not classes)
