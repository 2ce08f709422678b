"""Records the labels that weights were trained on, which a fair comparison must state.

Pretrained weights may have seen labels of the images that choose the epoch.
"""

from __future__ import annotations

import math
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, SerializerFunctionWrapHandler, model_serializer

# The overlap that inflates a result most comes first.
Overlap = Literal["held-out", "other data", "others"]


class SplitLabels(BaseModel):
    """The labels of one split that weights were trained on.

    Attributes:
        fingerprint: fingerprint of the split.
        left_out: number of images per class whose labels were not used (`data.leave_out_per_class`): the
            first in the order of hashes, by which `per_class` also draws.
        per_class: number of images per class whose labels were used (`data.labels_per_class`); None for all.
        holdout: fraction of these images that only chose the epoch (`finetune.holdout`), 0 to 1.
        draw: number of the draw of these images (`data.label_draw`).
        draws: number of draws that were left out, from `draw` on (`data.leave_out_draws`).
    """

    model_config = ConfigDict(strict=True, allow_inf_nan=False, frozen=True)

    fingerprint: str
    left_out: int = Field(default=0, ge=0)
    per_class: int | None = Field(default=None, gt=0)
    holdout: float = Field(default=0.0, ge=0, le=1)
    draw: int = Field(default=0, ge=0)
    draws: int = Field(default=1, gt=0)

    @model_serializer(mode="wrap")
    def _leave_out_usual_draw(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Omits `draw=0` and `draws=1`, so that bytes of encoder files stay the same."""
        values: dict[str, Any] = handler(self)
        return {
            key: value for key, value in values.items() if (key, value) not in (("draw", 0), ("draws", 1))
        }

    def and_of_this_split(self, before: SplitLabels) -> SplitLabels:
        """Returns the union with labels of the same split."""
        sizes = (self.per_class, before.per_class)
        same_draw = (self.draw, self.draws) == (before.draw, before.draws)
        return SplitLabels(
            fingerprint=self.fingerprint,
            # For different draws, the images that neither has seen are not the first in any order.
            left_out=min(self.left_out, before.left_out) if same_draw else 0,
            per_class=None if None in sizes or not same_draw else max(filter(None, sizes)),
            # Only draws from the same labels hold out the same images.
            holdout=min(self.holdout, before.holdout) if sizes[0] == sizes[1] and same_draw else 0.0,
            draw=self.draw,
            draws=self.draws if same_draw else 1,
        )

    def overlap_of_this_split(
        self, fingerprint: str, per_class: int | None, holdout: float, draw: int
    ) -> Overlap:
        """Computes `SeenLabels.overlap` for this split's labels only."""
        if fingerprint != self.fingerprint:
            return "other data"
        left_out = self.draw <= draw < self.draw + self.draws
        if not holdout or (left_out and self.left_out >= (per_class or math.inf)):
            return "others"
        # Draws from the same labels hold out the same images, and a smaller holdout is part of a larger one.
        same = (
            draw == self.draw
            and not self.left_out
            and per_class == self.per_class
            and holdout <= self.holdout
        )
        return "others" if same else "held-out"


class SeenLabels(SplitLabels):
    """The labels that weights were trained on, as recorded in their file.

    The fields of `SplitLabels` describe the split of the last training.

    Attributes:
        elsewhere: labels of other splits, from earlier training.
    """

    elsewhere: list[SplitLabels] = []

    def joined(self, before: SeenLabels | None) -> SeenLabels:
        """Adds the labels that the pretrained weights had seen."""
        known: dict[str, SplitLabels] = {}
        for labels in filter(None, (self, before)):
            for split in (labels, *labels.elsewhere):
                same = known.get(split.fingerprint)
                known[split.fingerprint] = same.and_of_this_split(split) if same else split
        own = {name: labels.model_dump(exclude={"elsewhere"}) for name, labels in sorted(known.items())}
        return SeenLabels(
            **own.pop(self.fingerprint), elsewhere=[SplitLabels(**split) for split in own.values()]
        )

    def overlap(self, fingerprint: str, per_class: int | None, holdout: float, *, draw: int = 0) -> Overlap:
        """Returns how these labels overlap with those of a run's held-out images.

        The run has `per_class` labels per class (None for all) of the split `fingerprint`, its number of the `draw`,
        and holds out a fraction `holdout` of them, 0 to 1. "held-out": labels of held-out images were seen. "other
        data": labels of another split were seen, which may contain the same images. "others": labels of the same split,
        but not of held-out images.
        """
        overlaps = {
            labels.overlap_of_this_split(fingerprint, per_class, holdout, draw)
            for labels in (self, *self.elsewhere)
        }
        return next(overlap for overlap in get_args(Overlap) if overlap in overlaps)
