"""Describes existing shards in place: only `dataset.json` and indexes are written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import numpy as np

from mae_vit.core.errors import InputError
from mae_vit.core.messages import count_of
from mae_vit.core.user_files import split_from_path
from mae_vit.data.prepare.convert import Conversion, as_before, convert_entries
from mae_vit.data.prepare.entries import Entry, numbered_classes, without_label_note
from mae_vit.data.prepare.listing import shown
from mae_vit.data.prepare.prepare import Report
from mae_vit.data.prepare.publish import describe, index_path, write_description, write_index
from mae_vit.data.prepare.statistics import Statistics
from mae_vit.data.shards.dataset_json import FILE_NAME, Dataset, Shard, describe_shard, read_dataset
from mae_vit.data.shards.index_files import index_shard
from mae_vit.data.shards.samples import read_samples
from mae_vit.data.shards.tar_headers import DamagedTar, IncompleteTar, Tar

# The rows of each shard in the index, by split.
Shards = dict[str, dict[Path, np.ndarray]]


def index_in_place(
    folder: Path,
    *,
    split: str = "train",
    overwrite: bool = False,
    conversion: Conversion | None = None,
    workers: int = 0,
) -> Report:
    """Describes the tars of a folder, which hold images and, with labels, class numbers. All bytes stay unchanged.

    The images are decoded and measured, unless the folder is described, no shard differs from its description, and no
    option of bands is given: then only the indexes are written. Names of classes, scale and missing value of bands,
    and records of how images were prepared stay. `split` is that of shards whose names contain none.

    Raises:
        InputError: if a shard or an image cannot be read, a label is no number, or `dataset.json` exists.
    """
    if not folder.is_dir():
        raise InputError(f"--in-place {folder}: is not a folder; give the folder of the shards")
    if (folder / FILE_NAME).exists() and not overwrite:
        raise InputError(f"{folder} already has {FILE_NAME}; --overwrite writes it again")
    known = read_dataset(folder) if (folder / FILE_NAME).exists() else None
    paths = sorted(path for path in folder.glob("*.tar") if path.is_file() and path.name[0] != ".")
    anew = f"`mae-vit prepare {folder} OUT` also reads other labels, compressed tars and subfolders"
    shards, negative = _list_images(paths, folder, split, known)
    if not shards:
        raise InputError(f"--in-place {folder}: no images in {count_of(len(paths), '.tar file')}; {anew}")
    if known is not None and split != "train" and split not in shards:
        raise InputError(
            f"--split {split}: {folder / FILE_NAME} already says the splits of its shards; delete it first"
        )
    classes = list(known.classes) if known else []
    largest = max(int(rows["label"].max()) for listed in shards.values() for rows in listed.values())
    if classes and largest >= len(classes):
        raise InputError(
            f"{folder} has images of class {largest}, but {FILE_NAME} has {len(classes)} classes; delete it first"
        )
    classes = classes or list(numbered_classes(largest, str(folder)))
    for name in shards:
        if not overwrite and index_path(folder, name).exists():
            raise InputError(f"{index_path(folder, name)} exists; --overwrite replaces it")
    described = {
        name: [describe_shard(path, len(rows)) for path, rows in listed.items()]
        for name, listed in shards.items()
    }
    notes, conversions = list[str](), Counter[str]()
    wanted = conversion or Conversion(in_place=True)
    same = known is not None and described == {name: info.shards for name, info in known.splits.items()}
    if known is not None and same and not wanted.of_bands:
        dataset = known
    else:
        statistics = _measure(shards, folder, as_before(wanted, known), workers)
        source = f"{folder.resolve().name} (in place)"
        kept = {
            name: {"source": info.source, "processing": info.processing, "masks": info.masks}
            for name, info in (known.splits.items() if known else ())
        }
        splits = {
            name: own.describe(described[name], source=source, classes=len(classes)).model_copy(
                update=kept.get(name)
            )
            for name, own in statistics.items()
        }
        main = statistics.get("train") or next(iter(statistics.values()))
        segmentation = {"segmentation": known.segmentation} if known else {}
        dataset = describe(classes, splits, main).model_copy(update=segmentation)
        notes, conversions = main.remarks(), sum((own.notes for own in statistics.values()), conversions)
    splits = {
        name: info.model_copy(update={"index": write_index(folder, [*shards[name].values()], name)})
        for name, info in dataset.splits.items()
    }
    dataset = dataset.model_copy(update={"splits": splits})
    write_description(folder, dataset)
    notes += _warn_of_damage(described, known) if known else []
    if largest < 0:
        notes.insert(0, f"no labels, since there are no class numbers in .cls; {anew}")
    notes = without_label_note(negative, "the class is negative") + notes
    if empty := len(paths) - sum(map(len, shards.values())):
        notes.insert(0, f"left out {empty} tars without images")
    return Report(dataset, sorted(splits), notes=notes, conversions=conversions)


def _warn_of_damage(described: Mapping[str, list[Shard]], known: Dataset) -> list[str]:
    recorded = {shard.file: shard for info in known.splits.values() for shard in info.shards}
    pairs = [(shard, recorded.get(shard.file, shard)) for own in described.values() for shard in own]
    differ = [now.file for now, before in pairs if now != before and now.bytes == before.bytes]
    what = f"not the bytes that {FILE_NAME} recorded, but as many: {shown(differ)}; check these images"
    return [f"warning: {what}"] if differ else []


def _list_images(paths: list[Path], folder: Path, split: str, known: Dataset | None) -> tuple[Shards, int]:
    """Returns the rows of the shards that hold images, and how many labels are negative."""
    split_of = {s.file: name for name, info in (known.splits if known else {}).items() for s in info.shards}
    if gone := split_of.keys() - {path.name for path in paths}:
        raise InputError(f"shard {folder / min(gone)} is missing; restore it, or delete {FILE_NAME} first")
    order = {file: number for number, file in enumerate(split_of)}
    shards, negative = Shards(), 0
    for path in sorted(paths, key=lambda path: order.get(path.name, len(order))):
        name = split_of.get(path.name) or split_from_path(path, folder, split)
        try:
            samples = list(read_samples(path))
            rows = index_shard(path, len(shards.get(name, ())), samples)
        except IncompleteTar as error:
            raise InputError(f"shard {error}") from None
        except (DamagedTar, OSError) as error:
            raise InputError(
                f"shard {error}; `mae-vit prepare {folder} OUT` may write new ones from it"
            ) from None
        if samples:
            shards.setdefault(name, {})[path] = rows
            labeled = sum(sample.label is not None for sample in samples)
            negative += labeled - int((rows["label"] >= 0).sum())
    return dict(sorted(shards.items())), negative


def _entries(split: str, listed: Mapping[Path, np.ndarray]) -> Iterator[Entry]:
    """Yields the images of a split; their headers are read once more rather than kept in memory."""
    for path, rows in listed.items():
        tar = Tar(path, path)
        for sample, number in zip(read_samples(path), rows["label"], strict=True):
            where, read = f"{path.name}, {sample.name}", partial(tar.read, sample.offset, sample.length)
            label = None if number < 0 else str(number)
            yield Entry(split, label, sample.key, where, sample.extension, read)


def _measure(shards: Shards, folder: Path, conversion: Conversion, workers: int) -> dict[str, Statistics]:
    """Decodes the images of all splits."""
    statistics: dict[str, Statistics] = {}
    for name, listed in shards.items():
        own, failed = Statistics(scale=conversion.scale), list[str]()
        for before in list(statistics.values())[:1]:
            own.expect(before.layout)
        count, reading = sum(map(len, listed.values())), f"reading {name}"
        entries = _entries(name, listed)
        for entry, _, image in convert_entries(entries, conversion, workers, reading, failed, count=count):
            own.add(image, None if entry.class_name is None else int(entry.class_name), entry.path)
        if failed:
            raise InputError(
                f"{count_of(len(failed), 'image')} cannot be read ({shown(failed)}); `mae-vit prepare {folder} OUT` "
                "writes shards without them"
            )
        statistics[name] = own
    return statistics
