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
    """The held-out images' hashes, and the training images that are the same files.

    They are left out if val is our draw, which may also have copies of test images. Where all splits are given they
    stay, since others use these splits too.
    """

    splits: Sequence[str]
    digests: Mapping[str, frozenset[bytes | None]]
    drawn: bool
    paths: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, by_split: Mapping[str, Sequence[Entry]], selection: Selection) -> Copies:
        """Reads the held-out images, if there are others to compare with."""
        splits = [split for split in MEASURED if split in by_split and "train" in by_split]
        of = {split: frozenset(digests_of(by_split[split], f"{split} images")) for split in splits}
        drawn = selection.holdout is not None
        digests = {"train": frozenset[bytes | None]().union(*of.values())}
        if drawn and "test" in of:
            digests[HOLDOUT_SPLIT] = of["test"]
        return cls(splits, digests, drawn)

    def skips(self, entry: Entry, data: bytes) -> bool:
        """Whether an image is left out as a copy; notes it also where copies stay."""
        held_out = self.digests.get(entry.split)
        if not held_out or hashlib.sha256(data).digest() not in held_out:
            return False
        self.paths.append(entry.path)
        return self.drawn

    def notes(self, unreadable: Sequence[str]) -> list[str]:
        """Words the count, without those that begin lines of `unreadable`."""
        failed = {line.partition(": ")[0] for line in unreadable}
        common = [path for path in map(plain_text, self.paths) if path not in failed]
        if not common:
            return []
        count, others = count_of(len(common), "image"), " or ".join(self.splits)
        if self.drawn:
            return [f"left out {count} of train that {others} has too"]
        return [
            f"warning: train and {others} have {count} in common, so accuracies will be too high; remove from one "
            f"of them: {shown(common)}"
        ]

    def left_out(self) -> list[tuple[str, str]]:
        """Returns the paths that were left out, and why."""
        return [(path, f"{' or '.join(self.splits)} has it too") for path in self.paths if self.drawn]
