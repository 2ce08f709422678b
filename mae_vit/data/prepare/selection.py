"""Chooses samples by shares and limits, with hashes of the samples' keys.

A draw depends only on the key, not on the order of files or on other classes. Shares are nested: 1/10 is part of 1/3.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from mae_vit.core.errors import InputError
from mae_vit.core.keyed_rng import SUBSET_HASH
from mae_vit.data.batches.subset import first_by_hash
from mae_vit.data.prepare.entries import Entry, ImageSource
from mae_vit.data.shards.dataset_json import TEST_SPLITS, Processing

HOLDOUT_SPLIT = "val"
# Results on these are compared: they stay whole.
MEASURED = TEST_SPLITS[::-1]
_HOLDOUT_HASH = b"mae-vit holdout"


@dataclass(frozen=True)
class Selection:
    """The selection options of `prepare`.

    Attributes:
        holdout: share of train that becomes the split "val".
        fraction: share of the remaining samples.
        limit_per_class: largest number of samples of each class.
        extra: images without labels, with keys of their own, that join train after all else.
    """

    holdout: Fraction | None = None
    fraction: Fraction | None = None
    limit_per_class: int | None = None
    extra: Sequence[ImageSource] = ()

    def apply(self, splits: dict[str, list[Entry]]) -> dict[str, list[Entry]]:
        """Returns the chosen entries by split, in the given order.

        The order is holdout, fraction, limit: the held-out samples depend on neither fraction nor limit.

        Raises:
            InputError: if a selection has no effect.
        """
        taken, train = dict(splits), splits.get("train", ())
        labeled = [entry for entry in train if entry.class_name is not None]
        # Selections are of labeled images alone, if there are any.
        apart = [entry for entry in train if entry.class_name is None] if labeled else []
        taken |= {"train": labeled} if apart else {}
        if self.holdout is not None:
            if "train" not in taken or HOLDOUT_SPLIT in taken:
                why = "there is a val" if "train" in taken else f"there is {', '.join(taken)}"
                raise InputError(f"--holdout draws {HOLDOUT_SPLIT} from train, but {why}; leave it out")
            train, held_out = draw_holdout(taken["train"], self.holdout, HOLDOUT_SPLIT)
            if not held_out:
                largest = max(Counter(entry.class_name for entry in train).values(), default=0)
                more = f"1/{2 * largest} or more, or " if largest > 1 else ""
                raise InputError(
                    f"--holdout {self.holdout} ({float(self.holdout):g}) rounds to no image of any class (the largest "
                    f"has {largest}); give {more}--no-labels to draw from all together"
                )
            taken |= {"train": train, HOLDOUT_SPLIT: held_out}
        for split in taken:
            if split not in MEASURED:
                taken[split] = self._subsample(taken[split], split)
        if apart:
            taken["train"] = [*taken["train"], *apart]
        if self.extra:
            if "train" not in taken:
                raise InputError(
                    f"--unlabeled adds to split train, but there is {', '.join(taken)}; leave it out"
                )
            taken["train"] = [*taken["train"], *(entry for source in self.extra for entry in source.entries)]
        return taken

    def note(self, split: str) -> Processing:
        """Returns the record of the selection for a split."""
        cut = split not in MEASURED
        return Processing(
            fraction=str(self.fraction) if self.fraction and cut else None,
            limit_per_class=self.limit_per_class if cut else None,
            holdout=str(self.holdout) if self.holdout and split in ("train", HOLDOUT_SPLIT) else None,
        )

    def _subsample(self, entries: list[Entry], split: str) -> list[Entry]:
        if self.fraction is not None:
            share = self.fraction
            # At least one image of each class, however small the share.
            entries = _first_by_hash(entries, lambda count: math.ceil(share * count), SUBSET_HASH)
        if self.limit_per_class is not None:
            limit = self.limit_per_class
            if all(entry.class_name is None for entry in entries):
                raise InputError(
                    f'--limit-per-class needs labels, which split "{split}" lacks; use --fraction'
                )
            labeled = [entry for entry in entries if entry.class_name is not None]
            kept = {entry.key for entry in _first_by_hash(labeled, lambda count: limit, SUBSET_HASH)}
            entries = [entry for entry in entries if entry.class_name is None or entry.key in kept]
        return entries


def draw_holdout(entries: Sequence[Entry], share: Fraction, split: str) -> tuple[list[Entry], list[Entry]]:
    """Draws a rounded share of each class, but never all of it; returns (the rest, the drawn entries as `split`)."""
    drawn = _first_by_hash(
        entries, lambda count: min(math.floor(share * count + Fraction(1, 2)), count - 1), _HOLDOUT_HASH
    )
    keys = {entry.key for entry in drawn}
    left = [entry for entry in entries if entry.key not in keys]
    return left, [replace(entry, split=split) for entry in drawn]


def _first_by_hash(entries: Sequence[Entry], quota: Callable[[int], int], salt: bytes) -> list[Entry]:
    keys, classes = [entry.key for entry in entries], [entry.class_name for entry in entries]
    return [entries[place] for place in first_by_hash(keys, classes, quota, salt)]
