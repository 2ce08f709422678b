"""The final report of `prepare`: what was written, what was left out, and warnings."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field

from mae_vit.core.messages import count_of
from mae_vit.data.prepare.listing import shown
from mae_vit.data.prepare.publish import excluded_file
from mae_vit.data.prepare.selection import MEASURED
from mae_vit.data.shards.dataset_json import Dataset

_NAMED = 5
# If at least this many classes have one image each, the labels are more likely captions.
_CAPTIONS = 5
_JOINT = re.compile(r"[|;,\s]+")


@dataclass(frozen=True)
class Report:
    """The result of `prepare`: the data set, splits written, images left out and why, and counted conversions."""

    dataset: Dataset
    written: list[str]
    unreadable: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    conversions: Counter[str] = field(default_factory=Counter)

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
            if len(self.unreadable) > _NAMED:
                lines.append(f"  and {len(self.unreadable) - _NAMED} more")
        lines += self.notes
        if self.conversions:
            images = "; ".join(f"{count:,} {what}" for what, count in sorted(self.conversions.items()))
            lines.append(f"images: {images}")
        return lines


def dataset_notes(dataset: Dataset) -> list[str]:
    """Warns of classes with doubtful names or counts, and of splits that do not match train."""
    notes, spelled, known = [], dict[str, str](), set(dataset.classes)
    joint = []
    for name in dataset.classes:
        if (other := spelled.setdefault(name.casefold(), name)) != name:
            notes.append(f'warning: the classes "{other}" and "{name}" differ only in case: is it one class?')
        words = [word for word in _JOINT.split(name) if word]
        joint += [name] if len(words) > 1 and known.issuperset(words) else []
    if joint:
        notes.append(
            f'warning: the class "{joint[0]}" joins others: for several labels an image, use --no-labels'
        )
    counts = [sum(info.class_counts[at] for info in dataset.splits.values()) for at in range(len(known))]
    if len(counts) >= _CAPTIONS and max(counts) == 1:
        notes.append("warning: each class has one image: are the labels captions? (--no-labels)")
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
            notes.append(f"warning: {split} was prepared otherwise than train: {', '.join(differing)}")
    return notes
