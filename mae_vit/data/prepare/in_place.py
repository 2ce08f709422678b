"""Describes existing shards in place: only `dataset.json` and indexes are written."""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from functools import partial
from pathlib import Path

import numpy as np

from mae_vit.core.errors import InputError
from mae_vit.core.messages import count_of, error_reason
from mae_vit.core.progress import progress
from mae_vit.core.user_files import split_from_path
from mae_vit.data.prepare.convert import Conversion, convert_entries
from mae_vit.data.prepare.entries import Entry, numbered_classes, without_label_note
from mae_vit.data.prepare.publish import describe, index_path, write_description, write_index, write_rows
from mae_vit.data.prepare.report import Report
from mae_vit.data.prepare.statistics import Statistics
from mae_vit.data.shards.dataset_json import FILE_NAME, describe_shard, read_dataset
from mae_vit.data.shards.index_files import index_shard, load_rows, reindex_hint
from mae_vit.data.shards.samples import class_number, read_samples
from mae_vit.data.shards.tar_headers import DamagedTar, IncompleteTar, Tar

_NAMED = 3


def index_in_place(
    folder: Path,
    *,
    split: str = "train",
    overwrite: bool = False,
    conversion: Conversion | None = None,
    workers: int = 0,
) -> Report:
    """Reads, decodes and describes the tars of a folder, which hold images and, with labels, class numbers.

    `split` is that of shards whose names contain none. All bytes stay unchanged.

    Raises:
        InputError: if a shard or an image cannot be read, a label is no number, or `dataset.json` exists.
    """
    if not folder.is_dir():
        raise InputError(f"--in-place {folder}: is no folder")
    if (folder / FILE_NAME).exists() and not overwrite:
        raise InputError(f"{folder} already has {FILE_NAME}: --overwrite makes it anew")
    paths = sorted(path for path in folder.glob("*.tar") if path.is_file() and path.name[0] != ".")
    anew = f"`mae-vit prepare {folder} OUT` reads other labels, compressed tars and folders below"
    shards: dict[str, dict[Path, list[Entry]]] = defaultdict(dict)
    labels, negative = [-1], 0
    for path in paths:
        name = split_from_path(path, folder, split)
        for entry, signed in _list_images(path, name, folder):
            shards[name].setdefault(path, []).append(entry)
            labels.append(-1 if entry.class_name is None else int(entry.class_name))
            negative += signed
    if not shards:
        raise InputError(f"--in-place {folder}: no images in {count_of(len(paths), '.tar file')}; {anew}")
    classes = list(numbered_classes(max(labels), str(folder)))
    conversion = conversion or Conversion(in_place=True)
    statistics: dict[str, Statistics] = {}
    splits = {}
    for name, listed in sorted(shards.items()):
        own, failed = Statistics(scale=conversion.bands.scale), list[str]()
        for before in list(statistics.values())[:1]:
            own.expect(before.layout)
        entries = [entry for part in listed.values() for entry in part]
        for entry, _, image in convert_entries(entries, conversion, workers, f"reading {name}", failed):
            own.add(image, None if entry.class_name is None else int(entry.class_name), entry.path)
        _reject(failed, folder)
        statistics[name] = own
        described = [describe_shard(path, len(part)) for path, part in listed.items()]
        splits[name] = own.describe(
            described, source=f"{folder.resolve().name} (in place)", classes=len(classes)
        )
    for name in splits:
        if not overwrite and index_path(folder, name).exists():
            raise InputError(f"{index_path(folder, name)} is there already: --overwrite replaces it")
    for name, info in splits.items():
        splits[name] = info.model_copy(update={"index": write_index(folder, info.shards, name)})
    main = statistics.get("train") or next(iter(statistics.values()))
    dataset = describe(classes, splits, main)
    write_description(folder, dataset)
    empty = len(paths) - sum(map(len, shards.values()))
    notes = [f"left out {empty} tars that hold no images"] if empty else []
    notes += without_label_note(negative, "the class is negative")
    if max(labels) < 0:
        notes.append(f"no labels, which are class numbers in .cls; {anew}")
    conversions = sum((part.notes for part in statistics.values()), Counter[str]())
    return Report(dataset, sorted(splits), notes=notes + main.remarks(), conversions=conversions)


def _list_images(path: Path, split: str, folder: Path) -> list[tuple[Entry, bool]]:
    """Returns the images of a shard, and whether the label of each is negative."""
    tar, entries = Tar(path, path), []
    try:
        for sample in read_samples(path):
            number = class_number(path, sample)
            name, read = f"{path.name}, {sample.name}", partial(tar.read, sample.offset, sample.length)
            label = None if number < 0 else str(number)
            entry = Entry(split, label, sample.key, name, sample.extension, read)
            entries.append((entry, number < 0 and sample.label is not None))
    except IncompleteTar as error:
        raise InputError(f"shard {error}") from None
    except (DamagedTar, OSError) as error:
        raise InputError(f"shard {error}; `mae-vit prepare {folder} OUT` may write others from it") from None
    return entries


def _reject(failed: list[str], folder: Path) -> None:
    if failed:
        more = f" and {len(failed) - _NAMED} more" if len(failed) > _NAMED else ""
        raise InputError(
            f"{count_of(len(failed), 'image')} cannot be read ({'; '.join(failed[:_NAMED])}{more}): "
            f"`mae-vit prepare {folder} OUT` writes shards without them"
        )


def reindex(folder: Path) -> Report:
    """Writes the indexes of a described folder again, if they were lost or another program rewrote the shards.

    Reads all headers, and all bytes of shards that may have changed: those with another size or number of samples, or
    newer than `dataset.json`. The described image sizes, formats, mean and std stay.

    Raises:
        InputError: if a shard is missing or damaged, or the folder cannot be written.
    """
    dataset = read_dataset(folder)
    if not os.access(folder, os.W_OK):
        raise InputError(f"--reindex: {reindex_hint(folder)}")
    since_ns, splits, notes = (folder / FILE_NAME).stat().st_mtime_ns, dict(dataset.splits), list[str]()
    rows: dict[str, list[np.ndarray]] = {}
    for name, info in splits.items():
        path = index_path(folder, name)
        if info.index is None and path.exists() and load_rows(path) is None:
            raise InputError(f"{path} is there already, and is no index: move it away")
        bar = progress(info.shards, desc=f"indexing {name}", unit=" shards", delay=2, leave=False)
        rows[name], shards = [], []
        for number, shard in enumerate(bar):
            part = _rows(folder / shard.file, number, len(dataset.classes))
            status = (folder / shard.file).stat()
            same = (status.st_size, len(part)) == (shard.bytes, shard.samples)
            same = same and status.st_mtime_ns <= since_ns
            shards.append(shard if same else describe_shard(folder / shard.file, len(part)))
            rows[name].append(part)
        if shards != info.shards:
            labels = np.concatenate([part["label"] for part in rows[name]])
            counts = np.bincount(labels[labels >= 0], minlength=len(dataset.classes)).tolist()
            changed = sum(shard != before for shard, before in zip(shards, info.shards, strict=True))
            notes.append(
                f"{name}: {count_of(changed, 'shard')} changed; image sizes, formats, mean and std stay as they were"
            )
            update = {"samples": len(labels), "shards": shards, "class_counts": counts}
            splits[name] = info.model_copy(update=update)
    # Only after all shards have been read.
    for name, parts in rows.items():
        splits[name] = splits[name].model_copy(update={"index": write_rows(folder, name, parts)})
    dataset = dataset.model_copy(update={"splits": splits})
    write_description(folder, dataset)
    return Report(dataset, sorted(splits), notes=notes)


def _rows(path: Path, number: int, classes: int) -> np.ndarray:
    """Returns the index rows of a described shard."""
    other = f"`mae-vit prepare {path.parent} OUT` may write others from it"
    try:
        rows = index_shard(path, number)
    except OSError as error:
        raise InputError(f"shard {path} cannot be read: {error_reason(error)}") from None
    except DamagedTar as error:
        raise InputError(f"shard {error}: put a whole one there; {other}") from None
    if not len(rows) or not rows["length"].all():
        raise InputError(f"shard {path} holds {'an empty image' if len(rows) else 'no images'}: {other}")
    if (largest := int(rows["label"].max())) >= classes:
        raise InputError(
            f"shard {path} holds a sample of class {largest}, {FILE_NAME} names {classes} classes"
        )
    return rows
