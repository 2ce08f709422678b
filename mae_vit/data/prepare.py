"""Writes sources as webdataset shards, atomically for each split."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from tqdm import tqdm

from mae_vit import __version__
from mae_vit.data.dataset import FILE_NAME, FORMAT, Dataset, Split, read_dataset
from mae_vit.data.decode import DecodeError, decode, image_size, is_grey
from mae_vit.data.order import permute
from mae_vit.data.shard_writer import ShardWriter
from mae_vit.data.sources import Entry, ImageSource
from mae_vit.errors import InputError
from mae_vit.keyed import Stream, derive_key

# Channel statistics settle long before this many images.
_STATISTICS_IMAGES = 50_000
# A constant: equal sources give equal shards.
_SEED = 0
_MIB = 1 << 20
_SHARD_PATTERN = "{split}-[0-9][0-9][0-9][0-9][0-9][0-9].tar"


@dataclass
class Statistics:
    """Per-channel mean and variance, gathered image by image."""

    images: int = 0
    pixels: int = 0
    total: np.ndarray = field(default_factory=lambda: np.zeros(3))
    squares: np.ndarray = field(default_factory=lambda: np.zeros(3))
    all_grey: bool = True

    def add(self, pixels: np.ndarray) -> None:
        """Adds an image, uint8 (3, H, W)."""
        # Integer sums are exact, whatever the order of images.
        flat = pixels.reshape(3, -1).astype(np.int64)
        self.images += 1
        self.pixels += flat.shape[1]
        self.total += flat.sum(axis=1)
        self.squares += (flat * flat).sum(axis=1)

    def mean_std(self) -> tuple[list[float], list[float]]:
        """Returns mean and standard deviation of pixels in 0..1, one value if all images are grey."""
        mean = self.total / self.pixels / 255
        variance = np.maximum(self.squares / self.pixels / 255**2 - mean**2, 0)
        channels = 1 if self.all_grey else 3
        return [round(float(v), 6) for v in mean[:channels]], [
            round(float(v), 6) for v in variance[:channels] ** 0.5
        ]


@dataclass(frozen=True)
class Report:
    """What `prepare` did.

    Attributes:
        dataset: as it now stands.
        written: names of the splits written.
        unreadable: images left out, with the reason.
        ignored: files that are no images.
    """

    dataset: Dataset
    written: list[str]
    unreadable: list[str]
    ignored: int


def prepare(
    sources: Sequence[ImageSource],
    out: Path,
    *,
    overwrite: bool = False,
    shard_bytes: int = 256 * _MIB,
    shard_samples: int = 10_000,
) -> Report:
    """Writes the splits of `sources` into `out`, beside those already there.

    A split is complete or absent: shards are written to a hidden folder and moved when
    all are there, `dataset.json` last.

    Args:
        sources: their splits must not overlap.
        out: the data folder.
        overwrite: replace splits that exist.
        shard_bytes: largest shard, about.
        shard_samples: most samples in a shard.

    Raises:
        InputError: if a split exists, comes from two sources, brings classes that the
            folder does not know, or holds no readable image.
    """
    existing = read_dataset(out) if (out / FILE_NAME).exists() else None
    by_split = _group(sources)
    if not overwrite:
        _refuse_strangers(by_split, existing, out)
    classes = _agree_on_classes(by_split, existing, out, overwrite)
    written: list[str] = []
    unreadable: list[str] = []
    dataset = existing
    for split, (source, entries) in by_split.items():
        part, statistics, failed = _write_split(
            split, entries, source.name, classes, out, shard_bytes=shard_bytes, shard_samples=shard_samples
        )
        unreadable += failed
        dataset = _publish(out, dataset, classes, split, part, statistics)
        written.append(split)
    assert dataset is not None
    return Report(dataset, written, unreadable, sum(source.ignored for source in sources))


def _group(sources: Sequence[ImageSource]) -> dict[str, tuple[ImageSource, list[Entry]]]:
    by_split: dict[str, tuple[ImageSource, list[Entry]]] = {}
    for source in sources:
        mine: dict[str, list[Entry]] = {}
        for entry in source.entries:
            mine.setdefault(entry.split, []).append(entry)
        for split, entries in mine.items():
            if split in by_split:
                raise InputError(
                    f'split "{split}" comes from both {by_split[split][0].name} and {source.name}: '
                    "give one source for each split, or --split NAME"
                )
            by_split[split] = (source, entries)
    # train first: its statistics are the dataset's.
    return dict(sorted(by_split.items(), key=lambda item: (item[0] != "train", item[0])))


def _refuse_strangers(splits: Iterable[str], existing: Dataset | None, out: Path) -> None:
    """Refuses to replace shards of these names that somebody else put there."""
    for split in splits:
        # A hidden folder beside them: ours, of a call that was killed while it moved shards.
        if (existing is not None and split in existing.splits) or _partial(out, split).exists():
            continue
        if strangers := sorted(out.glob(_SHARD_PATTERN.format(split=split))):
            raise InputError(
                f"{strangers[0]} is not described by {FILE_NAME}: give another folder, "
                "or --overwrite to replace it"
            )


def _partial(out: Path, split: str) -> Path:
    return out / f".{split}.partial"


def _agree_on_classes(
    by_split: dict[str, tuple[ImageSource, list[Entry]]], existing: Dataset | None, out: Path, overwrite: bool
) -> list[str]:
    found = {entry.class_name for _, entries in by_split.values() for entry in entries}
    if existing is None:
        return sorted(found)
    taken = [split for split in by_split if split in existing.splits]
    if taken and not overwrite:
        raise InputError(f'{out} already has split "{taken[0]}": --overwrite replaces it')
    if set(existing.splits) <= set(by_split):
        return sorted(found)
    if new := sorted(found - set(existing.classes)):
        raise InputError(
            f"{len(new)} classes are not among the {len(existing.classes)} of {out}: {', '.join(new[:5])}"
            f"{', ...' if len(new) > 5 else ''}"
        )
    return existing.classes


def _write_split(
    split: str,
    entries: list[Entry],
    source_name: str,
    classes: list[str],
    out: Path,
    *,
    shard_bytes: int,
    shard_samples: int,
) -> tuple[Split, Statistics, list[str]]:
    """Writes the shards of a split under temporary names, then moves them into place."""
    partial = _partial(out, split)
    shutil.rmtree(partial, ignore_errors=True)
    number_of = {name: number for number, name in enumerate(classes)}
    heights, widths = [], []
    formats: Counter[str] = Counter()
    counts = [0] * len(classes)
    statistics, failed = Statistics(), []
    keys: set[str] = set()
    # Images of all classes in every shard: readers that shuffle only within a buffer,
    # and our own order `blocks`, would else see one class at a time.
    order = permute(np.arange(len(entries)), len(entries), derive_key(_SEED, Stream.PREPARE, 0))
    try:
        partial.mkdir(parents=True)
        with ShardWriter(partial, split, shard_bytes, shard_samples) as writer:
            for number in tqdm(order, desc=f"writing {split}", unit=" images", mininterval=0.5):
                entry = entries[number]
                try:
                    data = entry.read()
                    height, width = image_size(data)
                    statistics.all_grey &= is_grey(data)
                    if statistics.images < _STATISTICS_IMAGES:
                        statistics.add(decode(data, 3))
                except (DecodeError, OSError) as error:
                    failed.append(f"{entry.class_name}/{entry.stem}.{entry.extension}: {error}")
                    continue
                label = number_of[entry.class_name]
                writer.write(_unique_key(entry, keys), entry.extension, data, label)
                heights.append(height)
                widths.append(width)
                formats[entry.extension] += 1
                counts[label] += 1
        if not heights:
            raise InputError(
                f'no image of split "{split}" can be read: {failed[0] if failed else "it is empty"}'
            )
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    part = Split(
        samples=len(heights),
        shards=writer.shards,
        source=source_name,
        height=(min(heights), max(heights)),
        width=(min(widths), max(widths)),
        formats=dict(sorted(formats.items())),
        class_counts=counts,
    )
    return part, statistics, failed


def _unique_key(entry: Entry, keys: set[str]) -> str:
    """CLASS/stem; webdataset takes all after the first dot of the basename as extension."""
    key = base = f"{entry.class_name}/{entry.stem.replace('.', '_')}"
    number = 2
    while key in keys:
        key = f"{base}_{number}"
        number += 1
    keys.add(key)
    return key


def _publish(
    out: Path, dataset: Dataset | None, classes: list[str], split: str, part: Split, statistics: Statistics
) -> Dataset:
    """Moves a split's shards into place, then says so in `dataset.json`."""
    old = dataset.splits.get(split) if dataset else None
    splits = dict(dataset.splits) if dataset else {}
    if old is not None and dataset is not None:
        # Until the new shards are described, the folder must not claim the old ones.
        del splits[split]
        if splits:
            _write_description(out, dataset.model_copy(update={"splits": splits}))
        else:
            (out / FILE_NAME).unlink()
    for stale in out.glob(_SHARD_PATTERN.format(split=split)):
        stale.unlink()
    partial = _partial(out, split)
    for shard in part.shards:
        os.rename(partial / shard.file, out / shard.file)
    splits[split] = part
    if split == "train" or dataset is None or not dataset.splits or list(splits) == [split]:
        mean, std = statistics.mean_std()
        described = {"mean": mean, "std": std, "statistics_images": statistics.images, "channels": len(mean)}
    else:
        described = dataset.model_dump(include={"mean", "std", "statistics_images", "channels"})
    dataset = Dataset(
        format=FORMAT,
        tool=f"mae-vit {__version__}",
        classes=classes,
        splits=dict(sorted(splits.items())),
        **described,
    )
    _write_description(out, dataset)
    # Last: until here it says whose the shards are, should this be killed.
    partial.rmdir()
    return dataset


def _write_description(out: Path, dataset: Dataset) -> None:
    with _replacing(out / FILE_NAME) as partial:
        partial.write_text(dataset.model_dump_json(indent=1) + "\n", encoding="utf-8")


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield partial
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
