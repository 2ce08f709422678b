"""The online probe: what frozen features are worth while they are pretrained.

It reads the encoder and labels of held-out images; it changes nothing and draws
nothing at random, so a run with it and one without are the same run.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mae_vit.batch import Batch
from mae_vit.evaluation.few_shot import least_squares_scores
from mae_vit.evaluation.knn import knn_scores
from mae_vit.objectives.base import Objective
from mae_vit.training.engine import Engine


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
