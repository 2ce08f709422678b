"""Which labels weights were trained on: what a fair comparison must say of a start, or of a teacher."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

Overlap = Literal["held-out", "others", "other data"]


class SeenLabels(BaseModel):
    """Labels that weights were trained on, as their file says.

    Attributes:
        fingerprint: of the split that they are of.
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

    def joined(self, before: SeenLabels | None) -> SeenLabels:
        """Adds labels that weights had seen before these; of another split these alone are told."""
        if before is None or before.fingerprint != self.fingerprint:
            return self
        sizes = (self.per_class, before.per_class)
        return SeenLabels(
            fingerprint=self.fingerprint,
            left_out=min(self.left_out, before.left_out),
            per_class=None if None in sizes else max(filter(None, sizes)),
            # The same images are held out of the same labels alone.
            holdout=min(self.holdout, before.holdout) if sizes[0] == sizes[1] else 0.0,
        )

    def overlap(self, fingerprint: str, per_class: int | None, holdout: float) -> Overlap:
        """Tells whether labels by which a run chooses its epoch were among them.

        Args:
            fingerprint: of the run's split.
            per_class: its labels of each class; None for all.
            holdout: share of these that it holds out.

        Returns:
            "held-out" if some were, "others" if labels of the same split were, but none of
            those, "other data" if another split's were: it may hold the same images.
        """
        if fingerprint != self.fingerprint:
            return "other data"
        if not holdout or self.left_out >= (per_class or math.inf):
            return "others"
        # The same images are held out of the same labels, fewer of them inside more.
        same = not self.left_out and per_class == self.per_class and holdout <= self.holdout
        return "others" if same else "held-out"
