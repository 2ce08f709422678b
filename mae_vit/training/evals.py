"""Held-out metrics and the online probe, with the same images and masks every time."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mae_vit.core.batch import Batch
from mae_vit.core.image_rows import Picture
from mae_vit.evaluation.few_shot import least_squares_scores
from mae_vit.evaluation.knn import knn_scores
from mae_vit.objectives.objective import Objective
from mae_vit.training.engines.base import Engine


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


@dataclass(frozen=True)
class OnlineProbe:
    """Labeled held-out images: some to fit on, some to score.

    Attributes:
        batches: this rank's part, without augmentation.
        places: int64, where this rank's images stand among all ranks'.
        labels: int64 (n + m,), of all ranks' images, support first.
        num_support: n.
        num_classes: K.
    """

    batches: Sequence[Batch]
    places: Tensor
    labels: Tensor
    num_support: int
    num_classes: int

    @torch.no_grad()
    def evaluate(self, engine: Engine) -> dict[str, float]:
        """Scores mean-pooled features of the final norm; collective.

        Returns:
            few_shot_top1 (least squares), knn_top1, chance_top1 (what it takes to name the class that
            most of the scored images have), and the seconds it took.
        """
        begun = time.monotonic()
        objective = engine.objective
        assert isinstance(objective, Objective)
        encoder = objective.encoder
        objective.eval()
        features = torch.zeros(len(self.labels), encoder.embed_dim, device=engine.device)
        with engine.module.context():
            parts = [
                encoder.forward_features(objective.normalize(batch.images.to(engine.device)))[:, 1:]
                .float()
                .mean(dim=1)
                for batch in self.batches
            ]
        objective.train()
        features[self.places.to(engine.device)] = torch.cat(parts)
        features = engine.all_reduce_sum(features)
        labels = self.labels.to(engine.device)
        support, query = features[: self.num_support], features[self.num_support :]
        fitted, asked = labels[: self.num_support], labels[self.num_support :]
        found = {}
        for name, score in (("few_shot_top1", least_squares_scores), ("knn_top1", knn_scores)):
            guess = score(support, fitted, query, num_classes=self.num_classes).argmax(dim=-1)
            found[name] = (guess == asked).double().mean().item()
        chance = self.labels[self.num_support :].bincount().max().item() / len(asked)
        return {**found, "chance_top1": chance, "seconds": time.monotonic() - begun}
