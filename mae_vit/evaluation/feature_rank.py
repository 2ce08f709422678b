"""Measures, without labels, how many dimensions features use.

Shapes: n images, D width.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

# Added to each share of the singular values (RankMe Sec. 3.1, for float32 features).
RANKME_EPS = 1e-7


def feature_sums(features: Tensor) -> Tensor:
    """Sums what `feature_metrics` needs of features (n, D); sums over parts of the images can be added.

    Returns:
        float64 (D * D + 2 * D + 1,): the products of all pairs of dimensions; sums and sums of squares
        of features scaled to length 1; and n.
    """
    rows = features.double()
    directions = F.normalize(rows, dim=1)
    parts = [
        rows.T @ rows,
        directions.sum(dim=0),
        directions.square().sum(dim=0),
        rows.new_full((1,), len(rows)),
    ]
    return torch.cat([part.flatten() for part in parts])


def feature_metrics(sums: Tensor, width: int) -> dict[str, float]:
    """Computes the measures from `feature_sums`; `width` is D.

    - `rankme`: the exponential of the entropy of the normalized singular values of the features (n, D), which
      are not centered (RankMe, arXiv 2210.02885, Eq. 1). It is at most min(n, D).
    - `feature_std`: standard deviation over images of features scaled to length 1, averaged over dimensions,
      times sqrt(D) (SimSiam, arXiv 2011.10566, Sec. 4.1). It is near 1 if features spread evenly over the
      sphere, and 0 if all are equal.

    Returns:
        Both measures; NaN if a feature is not finite.
    """
    if not torch.isfinite(sums).all():
        return {"rankme": math.nan, "feature_std": math.nan}
    gram, total, squares, count = sums.cpu().split([width**2, width, width, 1])
    images = float(count)
    # Singular values of (n, D) are the roots of the eigenvalues of (D, D). In float64 their error is
    # 1e-8 of the largest, a tenth of the paper's epsilon.
    eigenvalues = torch.linalg.eigvalsh(gram.view(width, width)).clamp(min=0)
    singular = eigenvalues.sqrt().sort(descending=True).values[: min(width, int(images))]
    variance = (squares / images - (total / images).square()).clamp(min=0)
    spread = variance.sqrt().mean().item() * math.sqrt(width)
    shares = singular / singular.sum().clamp(min=torch.finfo(torch.float64).tiny) + RANKME_EPS
    return {"rankme": math.exp(-(shares * shares.log()).sum().item()), "feature_std": spread}
