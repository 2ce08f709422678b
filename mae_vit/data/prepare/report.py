"""What `prepare` says at its end: what was written, what was left out, and what is odd about it."""

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
# Classes of one image each are more likely captions.
_CAPTIONS = 5
_JOINT = re.compile(r"[|;,\s]+")


@dataclass(frozen=True)
class Report:
    """The result of `prepare`.

    Attributes:
        dataset: as it now stands.
        written: names of the splits written.
        unreadable: images left out, with the reason.
        ignored: files that are no images.
        notes: remarks on other skipped files.
        conversions: how many images decoding changes in which way.
    """

    dataset: Dataset
    written: list[str]
    unreadable: list[str] = field(default_factory=list)
    ignored: int = 0
    notes: list[str] = field(default_factory=list)
    conversions: Counter[str] = field(default_factory=Counter)

    def lines(self) -> list[str]:
        """Says what was written and what was left out, for people."""
        lines = []
        for split in self.written:
            info = self.dataset.splits[split]
            labeled = sum(info.class_counts)
            labels = (
                "" if labeled == info.samples else f", {labeled:,} with labels" if labeled else ", no labels"
            )
            lines.append(
                f"{split}: {count_of(info.samples, 'image')} in {count_of(len(info.shards), 'shard')}{labels}"
            )
            if info.masks is not None:
                lines.append(f"  {info.masks.describe(self.dataset.segmentation)}")
            missing = [
                name
                for name, count in zip(self.dataset.classes, info.class_counts, strict=True)
                if labeled and not count
            ]
            if missing:
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
        if self.ignored:
            lines.append(f"ignored {count_of(self.ignored, 'file')} (no images)")
        lines += self.notes
        if self.conversions:
            images = "; ".join(f"{count:,} {what}" for what, count in sorted(self.conversions.items()))
            lines.append(f"images: {images}")
        return lines


def class_notes(dataset: Dataset) -> list[str]:
    """Names classes that are by their names no classes of their own, and those that only held-out splits have."""
    notes, spelled = [], dict[str, str]()
    for name in dataset.classes:
        if (other := spelled.setdefault(name.casefold(), name)) != name:
            notes.append(f'warning: the classes "{other}" and "{name}" differ only in case: is it one class?')
    known = set(dataset.classes)
    for name in dataset.classes:
        words = [word for word in _JOINT.split(name) if word]
        if len(words) > 1 and known.issuperset(words):
            notes.append(
                f'warning: the class "{name}" is by its name {" and ".join(words)}, which are classes, too: if images '
                "have several labels, --no-labels takes them alone"
            )
            break
    counts = [sum(info.class_counts[at] for info in dataset.splits.values()) for at in range(len(known))]
    if len(counts) >= _CAPTIONS and max(counts) == 1:
        notes.append(
            "warning: each class has one image: are the labels captions? --no-labels takes the images alone"
        )
    train = dataset.splits.get("train")
    if train is None or not any(train.class_counts):
        return notes
    for split, info in dataset.splits.items():
        pairs = zip(dataset.classes, info.class_counts, train.class_counts, strict=True)
        unknown = [name for name, count, known in pairs if split in MEASURED and count and not known]
        if unknown:
            notes.append(
                f"warning: {split} has images of {count_of(len(unknown), 'class', 'classes')} that train lacks "
                f"({shown(unknown)}): no model trained on it can get them right"
            )
    return notes


def processing_notes(dataset: Dataset) -> list[str]:
    """Names splits whose images were prepared otherwise than those of training."""
    if (train := dataset.splits.get("train")) is None:
        return []
    notes, ours = [], train.processing.of_images.model_dump()
    for split, info in dataset.splits.items():
        theirs = info.processing.of_images.model_dump()
        if differing := [
            f"{name} {theirs[name]} and not {ours[name]}" for name in ours if theirs[name] != ours[name]
        ]:
            notes.append(f"warning: {split} was prepared otherwise than train: {', '.join(differing)}")
    return notes
