"""Describes shards made by others where they lie: only `dataset.json` and indexes are written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from mae_vit.core.errors import InputError
from mae_vit.core.progress import progress
from mae_vit.data.prepare.convert import Conversion
from mae_vit.data.prepare.convert_pool import ConverterPool
from mae_vit.data.prepare.prepare import Report
from mae_vit.data.prepare.publish import describe, index_path, write_description, write_index
from mae_vit.data.prepare.sources.foreign_shards import numbered_classes, split_of
from mae_vit.data.prepare.statistics import Statistics
from mae_vit.data.shards.dataset_json import FILE_NAME, describe_shard
from mae_vit.data.shards.samples import Sample, class_number, images_of, read_samples
from mae_vit.data.shards.tar_headers import DamagedTar

_NAMED = 3


def index_in_place(
    folder: Path,
    *,
    split: str = "train",
    overwrite: bool = False,
    max_pixels: int | None = None,
    workers: int = 0,
) -> Report:
    """Reads, decodes and describes the shards of a folder.

    Args:
        folder: of tars that hold images, and class numbers where there are labels.
        split: of shards whose names tell none.
        overwrite: replace `dataset.json`.
        max_pixels: larger images count as unreadable.
        workers: processes that decode.

    Raises:
        InputError: if a shard or an image cannot be read, a label is no number, or
            there is a `dataset.json`.
    """
    if not folder.is_dir():
        raise InputError(f"--in-place {folder}: is no folder")
    if (folder / FILE_NAME).exists() and not overwrite:
        raise InputError(f"{folder} already has {FILE_NAME}: --overwrite makes it anew")
    paths = sorted(path for path in folder.glob("*.tar") if path.is_file() and not path.name.startswith("."))
    if not paths:
        raise InputError(f"--in-place {folder}: holds no .tar shards")
    samples = {path: _samples(path, folder) for path in paths}
    empty = [path for path in paths if not samples[path]]
    by_split: dict[str, list[Path]] = {}
    for path in paths:
        if samples[path]:
            by_split.setdefault(split_of(path, folder, split), []).append(path)
    if not by_split:
        raise InputError(f"--in-place {folder}: its {len(paths)} tars hold no images")
    labels = [label for path in paths for _, label in samples[path]]
    classes = numbered_classes(max(labels), folder)
    conversion = Conversion() if max_pixels is None else Conversion(max_pixels=max_pixels)
    gathered: dict[str, Statistics] = {}
    splits = {}
    with ConverterPool(conversion, workers) as pool:
        for name, shards in sorted(by_split.items()):
            gathered[name] = _measure(name, [(path, samples[path]) for path in shards], pool, folder)
            described = [describe_shard(path, len(samples[path])) for path in shards]
            splits[name] = gathered[name].describe(
                described, source=f"{folder.resolve().name} (in place)", classes=len(classes)
            )
    of = gathered.get("train") or next(iter(gathered.values()))
    for name in splits:
        if not overwrite and index_path(folder, name).exists():
            raise InputError(f"{index_path(folder, name)} is there already: --overwrite replaces it")
    for name, info in splits.items():
        splits[name] = info.model_copy(update={"index": write_index(folder, info.shards, name)})
    dataset = describe(classes, splits, of)
    write_description(folder, dataset)
    notes = [f"left out {len(empty)} tars that hold no images"] if empty else []
    conversions: Counter[str] = sum((s.notes for s in gathered.values()), Counter())
    return Report(dataset, sorted(splits), notes=notes, conversions=conversions)


def _samples(path: Path, folder: Path) -> list[tuple[Sample, int]]:
    try:
        return [(sample, class_number(path, sample)) for sample in read_samples(path)]
    except (DamagedTar, OSError) as error:
        raise InputError(f"shard {error}; `mae-vit prepare {folder} OUT` may write others from it") from None


def _measure(
    split: str, shards: list[tuple[Path, list[tuple[Sample, int]]]], pool: ConverterPool, folder: Path
) -> Statistics:
    statistics, failed = Statistics(), list[str]()
    count = sum(len(samples) for _, samples in shards)
    bar = progress(total=count, desc=f"reading {split}", unit=" images")
    with bar:
        for (path, sample, label), _, image in pool.run(_read_all(shards), count):
            bar.update()
            if isinstance(image, str):
                failed.append(f"{path.name}, {sample.key}.{sample.extension}: {image}")
            else:
                # It keeps its name, right or wrong.
                statistics.add(replace(image, extension=sample.extension), None if label < 0 else label)
    if failed:
        more = f" and {len(failed) - _NAMED} more" if len(failed) > _NAMED else ""
        raise InputError(
            f"{len(failed)} images cannot be read ({'; '.join(failed[:_NAMED])}{more}): "
            f"`mae-vit prepare {folder} OUT` writes shards without them"
        )
    return statistics


def _read_all(
    shards: list[tuple[Path, list[tuple[Sample, int]]]],
) -> Iterator[tuple[tuple[Path, Sample, int], bytes, str]]:
    for path, samples in shards:
        images = images_of(path, (sample for sample, _ in samples))
        for (sample, data), (_, label) in zip(images, samples, strict=True):
            yield (path, sample, label), data, sample.extension
