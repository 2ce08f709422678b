"""Describes existing shards in place: only `dataset.json` and indexes are written."""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mae_vit.core.errors import InputError
from mae_vit.core.messages import count_of, error_reason
from mae_vit.core.progress import progress
from mae_vit.core.user_files import split_from_path
from mae_vit.data.images.bounds import MAX_PIXELS
from mae_vit.data.prepare.bands.options import NO_OPTIONS, BandOptions
from mae_vit.data.prepare.convert import Conversion
from mae_vit.data.prepare.convert_pool import ConverterPool
from mae_vit.data.prepare.entries import numbered_classes, without_label_note
from mae_vit.data.prepare.publish import describe, index_path, write_description, write_index, write_rows
from mae_vit.data.prepare.report import Report
from mae_vit.data.prepare.statistics import Statistics
from mae_vit.data.shards.dataset_json import FILE_NAME, describe_shard, read_dataset
from mae_vit.data.shards.index_files import index_shard, load_rows, reindex_hint
from mae_vit.data.shards.samples import Sample, class_number, read_samples
from mae_vit.data.shards.tar_headers import DamagedTar, IncompleteTar, Tar

_NAMED = 3


def index_in_place(
    folder: Path,
    *,
    split: str = "train",
    overwrite: bool = False,
    max_pixels: int = MAX_PIXELS,
    bands: BandOptions = NO_OPTIONS,
    workers: int = 0,
) -> Report:
    """Reads, decodes and describes the shards of a folder.

    Args:
        folder: folder of tars that hold images and, with labels, class numbers.
        split: split of shards whose names contain none.
        overwrite: replace `dataset.json`.
        max_pixels: larger images count as unreadable.
        bands: scale and value of missing pixels.
        workers: number of decoding processes.

    Raises:
        InputError: if a shard or an image cannot be read, a label is no number, or `dataset.json` exists.
    """
    if not folder.is_dir():
        raise InputError(f"--in-place {folder}: is no folder")
    if (folder / FILE_NAME).exists() and not overwrite:
        raise InputError(f"{folder} already has {FILE_NAME}: --overwrite makes it anew")
    paths = sorted(path for path in folder.glob("*.tar") if path.is_file() and path.name[0] != ".")
    images = {path: _list_images(path, folder) for path in paths}
    if not any(images.values()):
        raise InputError(
            f"--in-place {folder}: no images in {count_of(len(paths), '.tar file')}; {_anew(folder)}"
        )
    by_split: dict[str, list[Path]] = defaultdict(list)
    for path in paths:
        if images[path]:
            by_split[split_from_path(path, folder, split)].append(path)
    labels = [image.label for path in paths for image in images[path]]
    classes = list(numbered_classes(max(labels), str(folder)))
    conversion = Conversion(max_pixels=max_pixels, in_place=True, bands=bands)
    statistics: dict[str, Statistics] = {}
    splits = {}
    with ConverterPool(conversion, workers) as pool:
        for name, shards in sorted(by_split.items()):
            own = Statistics(scale=bands.scale)
            for before in list(statistics.values())[:1]:
                own.expect(before.layout)
            _measure(name, [image for path in shards for image in images[path]], pool, folder, own)
            statistics[name] = own
            described = [describe_shard(path, len(images[path])) for path in shards]
            source = f"{folder.resolve().name} (in place)"
            splits[name] = own.describe(described, source=source, classes=len(classes))
    for name in splits:
        if not overwrite and index_path(folder, name).exists():
            raise InputError(f"{index_path(folder, name)} is there already: --overwrite replaces it")
    for name, info in splits.items():
        splits[name] = info.model_copy(update={"index": write_index(folder, info.shards, name)})
    main = statistics.get("train") or next(iter(statistics.values()))
    dataset = describe(classes, splits, main)
    write_description(folder, dataset)
    empty = sum(not images[path] for path in paths)
    notes = [f"left out {empty} tars that hold no images"] if empty else []
    every = (image for path in paths for image in images[path])
    negative = sum(image.sample.label is not None and image.label < 0 for image in every)
    notes += without_label_note(negative, "the class is negative")
    if max(labels) < 0:
        notes.append(f"no labels, which are class numbers in .cls; {_anew(folder)}")
    notes += main.remarks()
    conversions = sum((s.notes for s in statistics.values()), Counter[str]())
    return Report(dataset, sorted(splits), notes=notes, conversions=conversions)


def _anew(folder: Path) -> str:
    return f"`mae-vit prepare {folder} OUT` reads other labels, compressed tars and folders below"


def reindex(folder: Path) -> Report:
    """Writes the indexes of a described folder again, for a folder of an earlier version or with rewritten shards.

    Reads all headers, and all bytes of shards that may have changed: those with another size or number of samples, or
    newer than `dataset.json`. The described image sizes, formats, mean and std stay.

    Raises:
        InputError: if a shard is missing or damaged, or the folder cannot be written.
    """
    dataset = read_dataset(folder)
    if not os.access(folder, os.W_OK):
        raise InputError(f"--reindex: {reindex_hint(folder)}")
    for name, info in dataset.splits.items():
        path = index_path(folder, name)
        if info.index is None and path.exists() and load_rows(path) is None:
            raise InputError(f"{path} is there already, and is no index: move it away")
    since_ns, splits, notes = (folder / FILE_NAME).stat().st_mtime_ns, dict(dataset.splits), list[str]()
    rows: dict[str, list[np.ndarray]] = {}
    for name, info in splits.items():
        bar = progress(info.shards, desc=f"indexing {name}", unit=" shards", delay=2, leave=False)
        rows[name] = [
            _rows(folder / shard.file, number, len(dataset.classes)) for number, shard in enumerate(bar)
        ]
        shards = []
        for shard, part in zip(info.shards, rows[name], strict=True):
            status = (folder / shard.file).stat()
            same = (status.st_size, len(part)) == (
                shard.bytes,
                shard.samples,
            ) and status.st_mtime_ns <= since_ns
            shards.append(shard if same else describe_shard(folder / shard.file, len(part)))
        if shards != info.shards:
            labels = np.concatenate([part["label"] for part in rows[name]])
            counts = np.bincount(labels[labels >= 0], minlength=len(dataset.classes)).tolist()
            changed = sum(shard != before for shard, before in zip(shards, info.shards, strict=True))
            notes.append(
                f"{name}: {count_of(changed, 'shard')} changed; image sizes, formats, mean and std stay as they were"
            )
            splits[name] = info.model_copy(
                update={"samples": len(labels), "shards": shards, "class_counts": counts}
            )
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


class _Image(NamedTuple):
    """An image of a shard; `label` is -1 if it has none."""

    shard: Path
    sample: Sample
    label: int

    def read(self) -> bytes:
        return Tar(self.shard, self.shard).read(self.sample.offset, self.sample.length)


def _list_images(path: Path, folder: Path) -> list[_Image]:
    try:
        return [_Image(path, sample, class_number(path, sample)) for sample in read_samples(path)]
    except IncompleteTar as error:
        raise InputError(f"shard {error}") from None
    except (DamagedTar, OSError) as error:
        raise InputError(f"shard {error}; `mae-vit prepare {folder} OUT` may write others from it") from None


def _measure(
    split: str, images: Sequence[_Image], pool: ConverterPool, folder: Path, statistics: Statistics
) -> None:
    """Decodes the images of a split, and adds them to its statistics."""
    failed = list[str]()
    with progress(total=len(images), desc=f"reading {split}", unit=" images") as bar:
        encoded = ((image, image.read(), image.sample.extension) for image in images)
        for (shard, sample, label), _, result in pool.run(encoded, len(images)):
            bar.update()
            where = f"{shard.name}, {sample.name}"
            if isinstance(result, str):
                failed.append(f"{where}: {result}")
            else:
                # In place, the extension stays, right or wrong.
                kept = replace(result, extension=sample.extension)
                statistics.add(kept, None if label < 0 else label, where)
    if failed:
        more = f" and {len(failed) - _NAMED} more" if len(failed) > _NAMED else ""
        raise InputError(
            f"{count_of(len(failed), 'image')} cannot be read ({'; '.join(failed[:_NAMED])}{more}): "
            f"`mae-vit prepare {folder} OUT` writes shards without them"
        )
