"""Computes a classifier's predictions on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mae_vit.core.batch import Batch
from mae_vit.evaluation.metrics import Predictions
from mae_vit.finetuning.models.classifiers import Classifier
from mae_vit.runtime.collectives import sum_over_ranks
from mae_vit.runtime.ranks import Ranks


@dataclass(frozen=True)
class Predictor:
    """Classifies images on all ranks.

    Attributes:
        ranks: this process's place among all ranks, which take part.
        device: this rank's device.
        autocast: returns the autocast context of the run's precision.
        batch_size: images per batch.
    """

    ranks: Ranks
    device: torch.device
    autocast: Callable[[], AbstractContextManager[Any]]
    batch_size: int

    @torch.no_grad()
    def predict(self, model: Classifier, batches: Iterable[Batch], labels: np.ndarray) -> Predictions:
        """Classifies images; each rank computes its share; collective.

        Args:
            model: the classifier, on the device; it is left in evaluation mode.
            batches: this rank's share: every world_size-th image. Images that replace damaged ones
                are not counted.
            labels: int (n,), the labels of all images.

        Returns:
            Predictions for all images that are counted, the same on all ranks.
        """
        model.eval()
        rows = []
        with self.autocast():
            for batch in batches:
                moved = batch.to(self.device)
                first, confidence, in_top5 = _best(model.classify(moved).softmax(dim=-1), moved.labels)
                damaged = torch.tensor([one.sample for one in batch.damaged], dtype=torch.int64)
                whole = ~torch.isin(batch.keys.index, damaged).to(self.device)
                columns = [first, confidence, in_top5, whole]
                rows.append(torch.stack(columns, dim=1).double())
        table = torch.zeros(len(labels), 4, dtype=torch.float64, device=self.device)
        if rows:
            table[self.ranks.rank :: self.ranks.world_size] = torch.cat(rows)
        summed = sum_over_ranks(table, self.ranks).cpu().numpy()
        whole_ones = summed[:, 3] > 0
        labels, summed = labels[whole_ones], summed[whole_ones]
        return Predictions(
            labels.astype(np.int64), summed[:, 0].astype(np.int64), summed[:, 1], summed[:, 2].astype(bool)
        )


def predictions_of(labels: np.ndarray, chances: Tensor) -> Predictions:
    """Turns labels int64 (n,) and probabilities (n, K) into predictions."""
    best = _best(chances, torch.from_numpy(labels).to(chances.device))
    first, confidence, in_top5 = (column.cpu() for column in best)
    return Predictions(labels, first.numpy(), confidence.double().numpy(), in_top5.numpy())


def _best(chances: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the most probable class, its probability, and whether the label is in the top five; each (n,)."""
    top = chances.topk(min(5, chances.shape[1]), dim=-1)
    return top.indices[:, 0], top.values[:, 0], (top.indices == labels[:, None]).any(dim=1)
