"""Finds training images that the held-out splits have too, byte for byte."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from mae_vit.core.messages import count_of, plain_text
from mae_vit.data.prepare.entries import Entry, digests_of
from mae_vit.data.prepare.listing import shown
from mae_vit.data.prepare.selection import HOLDOUT_SPLIT, MEASURED, Selection


@dataclass
class Copies:
    """The held-out images' hashes, and the images of train that are the same files.

    They are left out if val is our draw. Where all splits are given they stay, since others use these splits too.

    Attributes:
        splits: the held-out splits.
        digests: of each split, the hashes of images that it should not have: train none of any, val none of test.
        drawn: whether val is our draw.
        paths: of train and val, the images that have them.
    """

    splits: Sequence[str]
    digests: Mapping[str, frozenset[bytes | None]]
    drawn: bool
    paths: dict[str, list[str]] = field(default_factory=lambda: {"train": [], HOLDOUT_SPLIT: []})

    @classmethod
    def of(cls, by_split: Mapping[str, Sequence[Entry]], selection: Selection) -> Copies:
        """Reads the held-out images, if there are others to compare with."""
        splits = [split for split in MEASURED if split in by_split and "train" in by_split]
        of = {split: frozenset(digests_of(by_split[split], f"images of {split}")) for split in splits}
        digests = {"train": frozenset[bytes | None]().union(*of.values())}
        if HOLDOUT_SPLIT in of:
            digests[HOLDOUT_SPLIT] = of.get("test", frozenset())
        return cls(splits, digests, selection.holdout is not None)

    def skips(self, entry: Entry, data: bytes) -> bool:
        """Whether an image is left out as a copy; notes it also where copies stay."""
        held_out = self.digests.get(entry.split)
        if not held_out or hashlib.sha256(data).digest() not in held_out:
            return False
        self.paths[entry.split].append(entry.path)
        return self.drawn and entry.split == "train"

    def notes(self, unreadable: Sequence[str]) -> list[str]:
        """Words the counts, without those that begin lines of `unreadable`."""
        failed, notes = {line.partition(": ")[0] for line in unreadable}, list[str]()
        for split, paths in self.paths.items():
            common = sorted(path for path in map(plain_text, paths) if path not in failed)
            others = " or ".join(other for other in self.splits if other != split)
            count = count_of(len(common), "image")
            if common and self.drawn and split == "train":
                notes.append(f"left out {count} of train that {others} has too")
            elif common:
                named = f"{split} and {others} have {count} in common ({shown(common)})"
                notes.append(f"warning: {named}, so accuracies will be too high")
        return notes

    def left_out(self) -> list[tuple[str, str]]:
        """Returns the paths that were left out, and why."""
        return [
            (path, f"{' or '.join(self.splits)} has it too") for path in self.paths["train"] if self.drawn
        ]
