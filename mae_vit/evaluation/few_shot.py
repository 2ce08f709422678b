"""Few-shot classification of frozen features by regularized least squares (ViT Sec. 4.1).

Shapes: n support images, m query images, D width, K classes.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from mae_vit.keyed import Stream, derive_key, words

# What the ViT authors' released code uses on standardized features.
L2_DEFAULT = 2.0**10


def least_squares_scores(
    support: Tensor, labels: Tensor, query: Tensor, *, num_classes: int, l2: float = L2_DEFAULT
) -> Tensor:
    """Fits features to targets in {-1, 1}^K in closed form and scores queries.

    Features are standardized by the support's mean and standard deviation; the
    intercept is not penalized.

    Args:
        support: (n, D) features.
        labels: int64 (n,).
        query: (m, D) features.
        num_classes: K.
        l2: weight of the squared norm of the coefficients, against the sum of squared
            errors.

    Returns:
        float64 (m, K); the largest is the predicted class.
    """
    support, query = support.double(), query.double()
    mean, std = support.mean(dim=0), support.std(dim=0, unbiased=False).clamp(min=1e-6)
    x, q = (support - mean) / std, (query - mean) / std
    targets = 2.0 * F.one_hot(labels, num_classes).double() - 1.0
    intercept = targets.mean(dim=0)
    y = targets - intercept
    n, width = x.shape
    # The smaller of the two equivalent systems: D x D, or n x n.
    if n < width:
        kernel = x @ x.T
        weights = x.T @ torch.linalg.solve(kernel + l2 * torch.eye(n, dtype=x.dtype, device=x.device), y)
    else:
        gram = x.T @ x
        weights = torch.linalg.solve(gram + l2 * torch.eye(width, dtype=x.dtype, device=x.device), x.T @ y)
    return q @ weights + intercept


def draw_shots(
    labels: np.ndarray, *, shots: int, queries: int, draw: int = 0, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Draws `shots` samples of each class, and `queries` of the others; keyed, so the same everywhere.

    Args:
        labels: (N,) classes, below 0 where there is none.
        shots: support samples of each class; fewer where half the class is less (without
            queries, where the class is).
        queries: largest number of query samples.
        draw: number of the draw; each is another.
        seed: of the draws.

    Returns:
        Sorted positions of support and of query samples, which share none.
    """
    high, _ = words(derive_key(seed, Stream.FEW_SHOT, draw), np.arange(len(labels)), 1)
    shuffled = np.argsort(high[:, 0], kind="stable")
    shuffled = shuffled[labels[shuffled] >= 0]
    support = []
    for number in np.unique(labels[shuffled]):
        members = shuffled[labels[shuffled] == number]
        support.append(members[: min(shots, len(members) // 2 if queries else len(members))])
    chosen = np.concatenate(support) if support else shuffled[:0]
    rest = shuffled[~np.isin(shuffled, chosen)]
    return np.sort(chosen), np.sort(rest[:queries])
