"""The modes without training: "knn" and "few_shot"."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mae_vit.evaluation.feature_rank import feature_metrics, feature_sums
from mae_vit.evaluation.few_shot import draw_shots, least_squares_scores
from mae_vit.evaluation.knn import knn_scores
from mae_vit.evaluation.metrics import Predictions
from mae_vit.finetuning.config.schema import FinetuneSection
from mae_vit.finetuning.frozen.features import Frozen
from mae_vit.finetuning.results import as_predictions, gather_rows
from mae_vit.finetuning.setup import Setup

# Mode that uses all labels -> its function, and its options, which the summary also lists. The function maps
# (support, labels, query, *, num_classes, **options) to scores (m, K) >= 0, not all 0 in a row; each row divided
# by its sum gives probabilities.
WITH_ALL_LABELS: dict[str, Callable[[FinetuneSection], tuple[Callable[..., Tensor], dict[str, Any]]]] = {
    "knn": lambda options: (knn_scores, {"neighbors": options.neighbors}),
}


def score_in_closed_form(frozen: Frozen) -> tuple[dict[str, Any], Predictions]:
    """Classifies the test images by nearest neighbors or least squares, on the device; collective.

    Returns:
        Entries of the summary, with measures of the training images' features, and predictions: for
        "few_shot" those of the last draw with the most shots.
    """
    setup, config, data = frozen.setup, frozen.setup.config, frozen.setup.data
    labels, test_labels, classes = frozen.train_labels(data.train), frozen.test_labels, len(data.classes)
    support = frozen.features(data.plain, data.train)
    width = support.shape[1]
    measures: dict[str, Any] = {**feature_metrics(feature_sums(support), width), "num_features": width}
    query = frozen.test_features()
    if config.finetune.mode in WITH_ALL_LABELS:
        fit, options = WITH_ALL_LABELS[config.finetune.mode](config.finetune)
        options |= {k: min(value, len(support)) for k, value in options.items() if k == "neighbors"}
        score = partial(fit, support, labels, num_classes=classes, **options)
        scores = _shared_scores(score, query, setup)
        guesses = as_predictions(test_labels, scores / scores.sum(dim=1, keepdim=True))
        measures |= {"test_top1": guesses.top1, "test_top5": guesses.top5, **options}
        return measures | {"test_most_frequent": guesses.most_frequent}, guesses
    results: dict[str, Any] = {}
    for shots in sorted(set(config.finetune.shots)):
        top1_by_draw = []
        for draw in range(config.finetune.draws):
            chosen, _ = draw_shots(
                labels.cpu().numpy(), shots=shots, queries=0, draw=draw, seed=config.run.seed
            )
            drawn = torch.from_numpy(chosen).to(setup.device)
            fit = partial(least_squares_scores, support[drawn], labels[drawn], num_classes=classes)
            guesses = as_predictions(test_labels, _shared_scores(fit, query, setup).softmax(dim=1))
            top1_by_draw.append(guesses.top1)
            if len(chosen) == len(labels):
                break  # all draws are equal
        spread = float(np.std(top1_by_draw, ddof=1)) if len(top1_by_draw) > 1 else None
        results[str(shots)] = {"mean": float(np.mean(top1_by_draw)), "std": spread, "draws": top1_by_draw}
    measures |= {"test_top1": results[str(max(config.finetune.shots))]["mean"], "few_shot": results}
    return measures | {"test_most_frequent": guesses.most_frequent}, guesses


def _shared_scores(score: Callable[[Tensor], Tensor], query: Tensor, setup: Setup) -> Tensor:
    """Scores queries (n, D), each rank every world_size-th: (n, K) on every rank; collective.

    `score` maps features (m, D) to scores (m, K), each row by its own features alone.
    """
    own = score(query[setup.ranks.rank :: setup.ranks.world_size])
    return gather_rows([own], (len(query), own.shape[1]), setup, own.dtype)
