"""Writes sources as webdataset shards, atomically for each split.

An image passes `sources/find.py` (which files), `convert.py` (decoded, resized, encoded; bands by
`mae_vit/data/images/bands/read.py`), `statistics.py` (mean, std, and `bands.py` of bands), and `publish.py`, which
writes the shards and puts them and `dataset.json` in place.
"""

from __future__ import annotations

import re
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path

import numpy as np

from mae_vit.core.errors import InputError
from mae_vit.core.keyed_rng import RngStream, derive_key
from mae_vit.core.messages import count_of, plain_text
from mae_vit.data.order.permutation import permute
from mae_vit.data.prepare.bands import shared_layout
from mae_vit.data.prepare.convert import Conversion, Converted, as_before, convert_entries
from mae_vit.data.prepare.copies import Copies
from mae_vit.data.prepare.entries import Entry, ImageSource
from mae_vit.data.prepare.folder_names import surely_split
from mae_vit.data.prepare.listing import shown
from mae_vit.data.prepare.masks import agreed_segmentation, read_mask, two_values_note
from mae_vit.data.prepare.near_duplicates import Exclusion, open_exclusion
from mae_vit.data.prepare.publish import (
    ShardWriter,
    check_no_foreign_shards,
    excluded_file,
    partial_folder,
    publish,
)
from mae_vit.data.prepare.selection import HOLDOUT_SPLIT, MEASURED, Selection
from mae_vit.data.prepare.statistics import Statistics
from mae_vit.data.shards.dataset_json import FILE_NAME, Dataset, Processing, Segmentation, read_dataset

# Constant, so that equal sources give equal shards.
_SEED = 0
_NAMED = 5
# The file of a data folder with the commands that prepared it, and all that they left out.
RECORD = "prepare.log"
# If at least this many classes have one image each, the labels are more likely captions.
_CAPTIONS = 5
# What pandas, R and Excel write for a missing cell.
_NO_LABELS = frozenset(("na", "n/a", "#n/a", "nan", "null"))
_JOINT = re.compile(r"[|;,\s]+")


def prepare(
    sources: Sequence[ImageSource],
    out: Path,
    *,
    overwrite: bool = False,
    shard_bytes: int = 256 << 20,
    shard_samples: int = 10_000,
    selection: Selection | None = None,
    conversion: Conversion | None = None,
    exclude: Sequence[str] = (),
    workers: int = 0,
) -> Report:
    """Writes the splits of `sources` into `out`, beside those already there.

    A split is complete or absent: its shards are moved from a hidden folder once all are written; `dataset.json` last.

    Args:
        sources: have splits that do not overlap.
        out: is the data folder.
        overwrite: replaces splits that exist; an interruption loses those not written yet.
        shard_bytes: limits the size of a shard, approximately.
        shard_samples: limits the samples of a shard.
        selection: says which samples to take; all by default.
        conversion: says how to store them; unchanged by default.
        exclude: names data folders, `DIR` or `DIR:SPLIT`, whose images are left out of all splits but val and test.
        workers: decode in processes of their own; 0 decodes in this process.

    Raises:
        InputError: if a split exists, comes from two sources, has classes new to the folder, or no readable image.
    """
    selection = selection or Selection()
    conversion = replace(conversion or Conversion(), hashed=bool(exclude))
    existing = read_dataset(out) if (out / FILE_NAME).exists() else None
    entries, source_of = group(sources)
    by_split = selection.apply(entries)
    # A holdout is of the source of train.
    origin = {split: source_of.get(split) or source_of["train"] for split in by_split}
    processing = {n: _processing(n, one.described, selection, conversion) for n, one in origin.items()}
    remaining = {} if existing is None else {n: s for n, s in existing.splits.items() if n not in by_split}
    _check_splits(origin, existing, out, overwrite=overwrite, scaled=conversion.scale is not None)
    classes = _agree_on_classes(sources, by_split, existing, out)
    masked = existing if any(info.masks for info in remaining.values()) else None
    segmentation = agreed_segmentation(sources, masked.segmentation if masked else None)
    exclusion = open_exclusion(exclude, workers, by_split) if exclude else None
    dataset = existing.model_copy(update={"splits": remaining}) if existing and remaining else None
    copies, unreadable, conversions = Copies.of(by_split, selection), list[str](), Counter[str]()
    notes = [note for source in (*sources, *selection.extra) for note in source.notes] + _meant_split(origin)
    # train first: the data set has its statistics.
    written = sorted(by_split, key=lambda name: (name != "train", name))
    for split in written:
        kept = as_before(conversion, origin[split].described)
        statistics = Statistics(scale=kept.scale)
        if dataset is not None:
            # Images must have the bands of the splits that stay.
            statistics.expect(None if dataset.bands.photographs else shared_layout(dataset.bands))
        writer = ShardWriter(partial_folder(out, split), split, shard_bytes, shard_samples)
        leaves_out = None if split in MEASURED else exclusion
        chosen, doing = by_split[split], f"writing {split}"
        # Mixed, so that every shard gets images of all classes. Otherwise, readers that shuffle only within a buffer,
        # and our own order `blocks`, would see one class at a time.
        order = permute(np.arange(len(chosen)), len(chosen), derive_key(_SEED, RngStream.PREPARE, 0))
        mixed = (chosen[number] for number in order)
        images = convert_entries(
            mixed, kept, workers, doing, unreadable, count=len(chosen), skips=copies.skips
        )
        try:
            with closing(images):
                _write_split(writer, images, classes, statistics, leaves_out, segmentation, unreadable)
        except BaseException:
            shutil.rmtree(writer.folder, ignore_errors=True)
            raise
        excluded = {} if leaves_out is None else {"excluded": leaves_out.describe()}
        joined = (origin[split], *(selection.extra if split == "train" else ()))
        part = statistics.describe(
            writer.shards,
            source=" + ".join(dict.fromkeys(one.name for one in joined)),
            classes=len(classes),
            processing=processing[split].model_copy(update=excluded),
        )
        dataset = publish(out, dataset, classes, split, part, statistics, segmentation)
        notes += statistics.remarks() if dataset.splits.keys() == {split} or split == "train" else []
        conversions += statistics.notes
        if segmentation is not None:
            notes += two_values_note(segmentation, statistics.mask_pixels)
    assert dataset is not None
    left_out = [item for source in (*sources, *selection.extra) for item in source.left_out.items()]
    notes += copies.notes(unreadable) + dataset_notes(dataset)
    return Report(dataset, written, unreadable, notes, conversions, left_out + copies.left_out())


def group(sources: Sequence[ImageSource]) -> tuple[dict[str, list[Entry]], dict[str, ImageSource]]:
    """Returns the entries, and the source, of each split."""
    by_split: dict[str, list[Entry]] = {}
    source_of: dict[str, ImageSource] = {}
    for source in sources:
        for entry in source.entries:
            if (other := source_of.setdefault(entry.split, source)) is not source:
                raise InputError(
                    f'split "{entry.split}" is in both {other.name} and {source.name}; give one source for each '
                    "split (a folder of both, unpacked), or prepare them one after the other with --split NAME"
                )
            by_split.setdefault(entry.split, []).append(entry)
    return by_split, source_of


def _meant_split(origin: Mapping[str, ImageSource]) -> list[str]:
    """Returns a note if all images go to train, but their folder has the name of another split, such as Valid."""
    (split, source), *others = origin.items()
    meant = None if others or split != "train" or source.described else surely_split(source.name)
    note = f"all images of {source.name} go to train; did you mean --split {meant}?"
    return [note] if meant in MEASURED else []


def _processing(
    split: str, known: Dataset | None, selection: Selection, conversion: Conversion
) -> Processing:
    """Returns the record of a split: what is done now, and what `prepare` did to the shards that it is made from."""
    shards = (known.splits.get(split) or known.splits.get("train")) if known else None
    before = shards.processing if shards else Processing()
    made = dict(selection.note(split)) | dict(conversion.how)
    now = {name: value for name, value in made.items() if value not in (None, "ignore")}
    if before.resize and before.resize <= now.get("resize", 0) and "exif_orientation" not in now:
        del now["quality"]  # no image is encoded anew
    if before.fraction and "fraction" in now:
        now["fraction"] = str(Fraction(before.fraction) * Fraction(now["fraction"]))
    for name in {"resize", "limit_per_class"} & now.keys():
        now[name] = min(now[name], getattr(before, name) or now[name])
    if twice := [name for name in ("bands", "window") if name in now and getattr(before, name)]:
        raise InputError(
            f"--{twice[0]}: the source was prepared with it; prepare the original images again, or leave it out"
        )
    return before.model_copy(update={"excluded": None} | now)


def _check_splits(
    new: Mapping[str, ImageSource], existing: Dataset | None, out: Path, *, overwrite: bool, scaled: bool
) -> None:
    """Raises InputError if a split exists, or one that stays does not go with the new ones, each with its source."""
    if not overwrite:
        check_no_foreign_shards(new, existing, out)
    there = existing.splits if existing else {}
    taken, remaining = [split for split in new if split in there], sorted(there.keys() - new.keys())
    if taken and not overwrite:
        meant = "".join(f" ({note})" for note in _meant_split(new))
        raise InputError(f'{out} already has split "{taken[0]}"; --overwrite replaces it{meant}')
    held_out = there[HOLDOUT_SPLIT].processing.holdout if HOLDOUT_SPLIT in remaining else None
    if "train" in taken and held_out:
        raise InputError(
            f"{out} has a split {HOLDOUT_SPLIT} that was held out of the train to be replaced; give --holdout "
            f"{held_out} again, or another folder"
        )
    if scaled and remaining and "train" not in new:
        raise InputError(
            f"--scale has no effect: {out} keeps the scale of its {', '.join(remaining)}; leave it out, or give "
            "another folder"
        )


def _agree_on_classes(
    sources: Sequence[ImageSource], by_split: dict[str, list[Entry]], existing: Dataset | None, out: Path
) -> list[str]:
    names = {
        entry.class_name for entries in by_split.values() for entry in entries if entry.class_name is not None
    }
    # A source may order its classes: by number, or as the shards that it read.
    ordered = {source.classes for source in sources if source.classes is not None}
    fresh = list(ordered.pop()) if len(ordered) == 1 else sorted(names)
    fresh = fresh if names <= set(fresh) else sorted(names)
    if existing is None:
        return fresh
    if set(existing.splits) <= set(by_split) or not existing.classes:
        return fresh
    if new := sorted(names - set(existing.classes)):
        raise InputError(
            f"{count_of(len(new), 'class', 'classes')} not among the {len(existing.classes)} of {out} "
            f"({shown(new)}); give another folder"
        )
    return existing.classes


def _write_split(
    writer: ShardWriter,
    images: Iterator[tuple[Entry, bytes, Converted]],
    classes: Sequence[str],
    statistics: Statistics,
    exclusion: Exclusion | None,
    segmentation: Segmentation | None,
    failed: Sequence[str],
) -> None:
    """Writes the shards of a split into the writer's folder, which is emptied first; `failed` has those left out.

    Raises:
        InputError: if no image is left, or a band has no values.
    """
    split, label_of, before = writer.split, {name: n for n, name in enumerate(classes)}, len(failed)
    shutil.rmtree(writer.folder, ignore_errors=True)
    writer.folder.mkdir(parents=True)
    if exclusion is not None:
        exclusion.lines.clear()
    with writer:
        for entry, data, image in images:
            mask = None
            if exclusion is not None and exclusion.excludes(entry.key, image):
                continue
            if segmentation is not None and entry.read_mask is not None:
                mask, pixels = read_mask(entry, image, segmentation)
                statistics.add_mask(pixels)
            label = None if entry.class_name is None else label_of[entry.class_name]
            statistics.add(image, label, entry.path)
            writer.write(entry.key, image.extension, image.data or data, label, mask)
    left_out = exclusion.lines if exclusion is not None else []
    if not statistics.images and left_out:
        raise InputError(
            f'--exclude leaves nothing of split "{split}", since all its images are copies; check that folder and '
            "source differ"
        )
    if not statistics.images:
        why = failed[before] if len(failed) > before else "it is empty"
        raise InputError(f'no image of split "{split}" can be read ({why})')
    if left_out:
        listed = writer.folder / excluded_file(split)
        listed.write_text("\n".join([*left_out, ""]), encoding="utf-8")
    statistics.describe_bands()


@dataclass(frozen=True)
class Report:
    """The result of `prepare`: the data set, splits written, files left out and why, and counted conversions."""

    dataset: Dataset
    written: list[str]
    unreadable: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    conversions: Counter[str] = field(default_factory=Counter)
    left_out: list[tuple[str, str]] = field(default_factory=list)

    def record(self, out: Path, command: str) -> None:
        """Writes command and result to the record of a data folder, behind those of splits that stay."""
        mode = "a" if self.dataset.splits.keys() > set(self.written) else "w"
        others = (f"{plain_text(path)}: {why}" for path, why in self.left_out)
        with (out / RECORD).open(mode, encoding="utf-8", errors="surrogateescape") as file:
            print(f"$ {command}", *self.lines(), *self.unreadable, *others, sep="\n", file=file)

    def lines(self) -> list[str]:
        """Formats what was written and what was left out."""
        lines = []
        for split in self.written:
            info = self.dataset.splits[split]
            labeled = sum(info.class_counts)
            labels = f", {labeled:,} with labels" if labeled else ", no labels"
            counts = f"{count_of(info.samples, 'image')} in {count_of(len(info.shards), 'shard')}"
            lines.append(f"{split}: {counts}{'' if labeled == info.samples else labels}")
            if info.masks is not None:
                lines.append(f"  {info.masks.describe(self.dataset.segmentation)}")
            by_class = zip(self.dataset.classes, info.class_counts, strict=True)
            if missing := [name for name, count in by_class if labeled and not count]:
                count = count_of(len(missing), "class", "classes")
                lines.append(
                    f"  {count} of {len(info.class_counts)} without an image in it: {shown(missing)}"
                )
            for excluded in info.processing.excluded or ():
                listed = f" ({excluded_file(split)} names them)" if excluded.samples else ""
                lines.append(
                    f"  left out {count_of(excluded.samples, 'image')} that {excluded.source} has too, by "
                    f"{excluded.hash} within {excluded.distance}{listed}"
                )
        if self.unreadable:
            lines.append(f"left out {count_of(len(self.unreadable), 'unreadable image')}:")
            lines += [f"  {line}" for line in self.unreadable[:_NAMED]]
        lines += self.notes
        if self.conversions:
            images = "; ".join(f"{count:,} {what}" for what, count in sorted(self.conversions.items()))
            lines.append(f"images: {images}")
        if left_out := len(self.unreadable) + len(self.left_out):
            lines.append(
                f"left out {count_of(left_out, 'file')} in all; {RECORD} names each, with the reason"
            )
        return lines


def dataset_notes(dataset: Dataset) -> list[str]:
    """Warns of classes with doubtful names or counts, and of splits that do not match train."""
    notes, spelled, known = [], dict[str, str](), set(dataset.classes)
    joint = []
    for name in dataset.classes:
        if (other := spelled.setdefault(name.casefold(), name)) != name:
            notes.append(
                f'warning: the classes "{other}" and "{name}" differ only in case; are they one class?'
            )
        if name.casefold() in _NO_LABELS:
            notes.append(
                f'warning: the class "{name}" may mean that a label is missing; if so, empty those cells'
            )
        words = [word for word in _JOINT.split(name) if word]
        joint += [name] if len(words) > 1 and known.issuperset(words) else []
    if joint:
        notes.append(
            f'warning: the class "{joint[0]}" joins others; if images have several labels, use --no-labels'
        )
    counts = [sum(info.class_counts[at] for info in dataset.splits.values()) for at in range(len(known))]
    if len(counts) >= _CAPTIONS and max(counts) == 1:
        notes.append("warning: each class has one image; are the labels captions? (--no-labels)")
    if (train := dataset.splits.get("train")) is None:
        return notes
    for split, info in dataset.splits.items():
        pairs = zip(dataset.classes, info.class_counts, train.class_counts, strict=True)
        unknown = [name for name, count, trained in pairs if count and not trained]
        if unknown and split in MEASURED and any(train.class_counts):
            count = count_of(len(unknown), "class", "classes")
            notes.append(f"warning: {split} has images of {count} that train lacks ({shown(unknown)})")
        ours, theirs = train.processing.of_images.model_dump(), info.processing.of_images.model_dump()
        if differing := [
            f"{key} {theirs[key]} and not {ours[key]}" for key in ours if theirs[key] != ours[key]
        ]:
            notes.append(f"warning: {split} was prepared differently from train: {', '.join(differing)}")
    return notes
