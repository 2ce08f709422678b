"""Few-shot classification of frozen features by regularized least squares (ViT Sec. 4.1).

Shapes: n support images, m query images, D width, K classes; r rows of a part.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from mae_vit.core.keyed_rng import RngStream, derive_key, random_uint32

# The value of the ViT authors' released code, for standardized features.
L2_DEFAULT = 2.0**10
# Numbers per part: 2**26 float64 = 512 MiB.
_MAX_NUMBERS = 1 << 26


def least_squares_scores(
    support: Tensor, labels: Tensor, query: Tensor, *, num_classes: int, l2: float = L2_DEFAULT
) -> Tensor:
    """Fits features (n, D) to targets in {-1, 1}^K in closed form and scores queries (m, D).

    Features are standardized by the support's mean and standard deviation; the
    intercept is not penalized. `l2` weighs the coefficients' squared norm; the sum of squared
    errors has weight 1. Computed in parts, on the features' device.

    Returns:
        float64 (m, K); the largest is the predicted class.
    """
    n, width = support.shape
    rows = max(1, _MAX_NUMBERS // max(width, num_classes))
    parts, targets = support.split(rows), labels.split(rows)
    mean = sum(part.double().sum(dim=0) for part in parts) / n  # (D,)
    variance = sum((part.double() - mean).square().sum(dim=0) for part in parts) / n
    std = variance.sqrt().clamp(min=1e-6)  # (D,)

    def standardized(part: Tensor) -> Tensor:
        return (part.double() - mean) / std

    def signs(part: Tensor) -> Tensor:
        return 2.0 * F.one_hot(part, num_classes).double() - 1.0  # (r, K)

    intercept = sum(signs(part).sum(dim=0) for part in targets) / n  # (K,)
    # Both systems have the same solution; solve the smaller one, D x D or n x n.
    if n < width:
        x = standardized(support)  # (n, D)
        weights = x.T @ torch.linalg.solve(_with_l2(x @ x.T, l2), signs(labels) - intercept)  # (D, K)
    else:
        gram = moments = support.new_zeros((), dtype=torch.float64)  # (D, D) and (D, K) once a part is added
        for part, target in zip(parts, targets, strict=True):
            x = standardized(part)  # (r, D)
            gram, moments = gram + x.T @ x, moments + x.T @ (signs(target) - intercept)
        weights = torch.linalg.solve(_with_l2(gram, l2), moments)  # (D, K)
    return torch.cat([standardized(part) @ weights + intercept for part in query.split(rows)])


def _with_l2(gram: Tensor, l2: float) -> Tensor:
    return gram + l2 * torch.eye(len(gram), dtype=gram.dtype, device=gram.device)


def draw_shots(
    labels: np.ndarray, *, shots: int, queries: int, draw: int = 0, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Draws `shots` support samples of each class, and `queries` of the rest. Keyed: all processes draw the same.

    A negative label means none. With queries, at most half of a class becomes support.

    Returns:
        Sorted, disjoint indices of support and query samples.
    """
    high, _ = random_uint32(derive_key(seed, RngStream.FEW_SHOT, draw), np.arange(len(labels)), 1)
    shuffled = np.argsort(high[:, 0], kind="stable")
    shuffled = shuffled[labels[shuffled] >= 0]
    support = []
    for number in np.unique(labels[shuffled]):
        members = shuffled[labels[shuffled] == number]
        support.append(members[: min(shots, len(members) // 2 if queries else len(members))])
    chosen = np.concatenate(support) if support else shuffled[:0]
    rest = shuffled[~np.isin(shuffled, chosen)]
    return np.sort(chosen), np.sort(rest[:queries])
