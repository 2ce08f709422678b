"""The objective on held-out images, with the same images and masks every time."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from mae_vit.batch import Batch
from mae_vit.objectives.base import Picture
from mae_vit.training.engine import Engine


@dataclass(frozen=True)
class HeldOut:
    """Fixed images of a split that is not trained on.

    Attributes:
        batches: this rank's part, without augmentation, keyed alike in every run; gone
            through at each evaluation.
        shown: the few that are drawn.
    """

    batches: Iterable[Batch]
    shown: Batch

    @torch.no_grad()
    def evaluate(self, engine: Engine) -> dict[str, float]:
        """Computes the objective's metrics over all ranks' parts; collective."""
        totals: dict[str, torch.Tensor] = {}
        engine.objective.eval()
        with engine.module.context():
            for batch in self.batches:
                for name, value in engine.objective.evaluation_sums(batch.to(engine.device)).items():
                    totals[name] = totals.get(name, 0.0) + value.double()
        engine.objective.train()
        names = sorted(totals)
        sums = engine.all_reduce_sum(torch.stack([totals[name] for name in names])).tolist()
        return engine.objective.evaluation_metrics(dict(zip(names, sums, strict=True)))

    @torch.no_grad()
    def pictures(self, engine: Engine) -> list[Picture]:
        """Draws the few that are shown; not collective."""
        engine.objective.eval()
        with engine.module.context():
            rows = engine.objective.pictures(self.shown.to(engine.device))
        engine.objective.train()
        return rows
