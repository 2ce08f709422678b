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
from mae_vit.runtime.ranks import Ranks, sum_over_ranks


@dataclass(frozen=True)
class Predictor:
    """Classifies images on all ranks.

    Attributes:
        ranks: this process's rank and the world size; all ranks take part.
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
            batches: this rank's share, every world_size-th image. Replacements of damaged ones do not count.
            labels: int (n,), the labels of all images.

        Returns:
            Predictions for all images that are counted, the same on all ranks.
        """
        model.eval()
        rows = []
        with self.autocast():
            for batch in batches:
                moved = batch.to(self.device)
                columns = _best(model.classify(moved).softmax(dim=-1), moved.labels)
                rows.append(torch.stack([*columns, intact(batch).to(self.device)], dim=1).double())
        table = gather_rows(rows, (len(labels), 4), self)
        counted = table[:, 3] > 0
        labels, table = labels[counted], table[counted]
        return Predictions(
            labels.astype(np.int64), table[:, 0].astype(np.int64), table[:, 1], table[:, 2].astype(bool)
        )


def intact(batch: Batch) -> Tensor:
    """Returns which images are not replacements of damaged ones: bool (B,), on the CPU."""
    damaged = torch.tensor([sample.sample for sample in batch.damaged], dtype=torch.int64)
    return ~torch.isin(batch.keys.index, damaged)


def gather_rows(rows: list[Tensor], shape: tuple[int, int], predictor: Predictor) -> np.ndarray:
    """Interleaves the rows of all ranks, each with every world_size-th: float64 of `shape`; collective."""
    ranks = predictor.ranks
    table = torch.zeros(*shape, dtype=torch.float64, device=predictor.device)
    if rows:
        table[ranks.rank :: ranks.world_size] = torch.cat(rows)
    return sum_over_ranks(table, ranks).cpu().numpy()


def as_predictions(labels: np.ndarray, chances: Tensor) -> Predictions:
    """Turns labels int64 (n,) and probabilities (n, K) into predictions."""
    best = _best(chances, torch.from_numpy(labels).to(chances.device))
    first, confidence, in_top5 = (column.cpu() for column in best)
    return Predictions(labels, first.numpy(), confidence.double().numpy(), in_top5.numpy())


def _best(chances: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the most probable class, its probability, and whether the label is in the top five; each (n,)."""
    top = chances.topk(min(5, chances.shape[1]), dim=-1)
    return top.indices[:, 0], top.values[:, 0], (top.indices == labels[:, None]).any(dim=1)
