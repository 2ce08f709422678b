"""Which labels weights were trained on: what a fair comparison must say of a start, or of a teacher."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field

# What flatters a run most comes first.
Overlap = Literal["held-out", "other data", "others"]


class SplitLabels(BaseModel):
    """Labels of one split.

    Attributes:
        fingerprint: of the split.
        left_out: images of each class whose labels were not seen (`data.leave_out_per_class`),
            the first by the hash that `per_class` goes by too.
        per_class: of how many images of each class there were labels (`data.labels_per_class`);
            None for all.
        holdout: share of these that only chose (`finetune.holdout`).
    """

    model_config = ConfigDict(strict=True, allow_inf_nan=False, frozen=True)

    fingerprint: str
    left_out: int = Field(default=0, ge=0)
    per_class: int | None = Field(default=None, gt=0)
    holdout: float = Field(default=0.0, ge=0, le=1)

    def and_of_this_split(self, before: SplitLabels) -> SplitLabels:
        """Adds labels of the same split."""
        sizes = (self.per_class, before.per_class)
        return SplitLabels(
            fingerprint=self.fingerprint,
            left_out=min(self.left_out, before.left_out),
            per_class=None if None in sizes else max(filter(None, sizes)),
            # The same images are held out of the same labels alone.
            holdout=min(self.holdout, before.holdout) if sizes[0] == sizes[1] else 0.0,
        )

    def overlap_of_this_split(self, fingerprint: str, per_class: int | None, holdout: float) -> Overlap:
        """As `SeenLabels.overlap`, of these alone."""
        if fingerprint != self.fingerprint:
            return "other data"
        if not holdout or self.left_out >= (per_class or math.inf):
            return "others"
        # The same images are held out of the same labels, fewer of them inside more.
        same = not self.left_out and per_class == self.per_class and holdout <= self.holdout
        return "others" if same else "held-out"


class SeenLabels(SplitLabels):
    """Labels that weights were trained on, as their file says.

    Attributes:
        elsewhere: those of other splits than the last one's.
    """

    elsewhere: list[SplitLabels] = []

    def joined(self, *before: SeenLabels | None) -> SeenLabels:
        """Adds labels that weights had seen before these, or learned from."""
        known: dict[str, SplitLabels] = {}
        for one in (self, *filter(None, before)):
            for split in (one, *one.elsewhere):
                same = known.get(split.fingerprint)
                known[split.fingerprint] = same.and_of_this_split(split) if same else split
        of_this_data = known.pop(self.fingerprint)
        elsewhere = [SplitLabels(**_own_fields(known[name])) for name in sorted(known)]
        return SeenLabels(**_own_fields(of_this_data), elsewhere=elsewhere)

    def overlap(self, fingerprint: str, per_class: int | None, holdout: float) -> Overlap:
        """Tells whether labels by which a run chooses its epoch were among them.

        Args:
            fingerprint: of the run's split.
            per_class: its labels of each class; None for all.
            holdout: share of these that it holds out.

        Returns:
            "held-out" if some were; "other data" if another split's were, which may hold the same
            images; "others" if labels of the same split were, but none of those.
        """
        overlaps = {
            labels.overlap_of_this_split(fingerprint, per_class, holdout)
            for labels in (self, *self.elsewhere)
        }
        return most_flattering(overlaps)  # type: ignore[return-value]


def most_flattering(overlaps: Collection[Overlap]) -> Overlap | None:
    """Of several overlaps the one that flatters most; None of none."""
    return next((overlap for overlap in get_args(Overlap) if overlap in overlaps), None)


def _own_fields(labels: SplitLabels) -> dict[str, Any]:
    return {name: getattr(labels, name) for name in SplitLabels.model_fields}
