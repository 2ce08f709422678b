"""Weighted nearest neighbors of frozen features (Wu et al., arXiv 1805.01978, Sec. 3.4).

Shapes: n support images, m query images, r of them in a chunk, k neighbors, D width, K classes.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

# The paper's temperature; it uses 200 neighbors on ImageNet, later work 20.
TEMPERATURE = 0.07
NEIGHBORS = 20
# Similarities per chunk: 2**26 float32 = 256 MiB.
_MAX_SIMILARITIES = 1 << 26


def knn_scores(
    support: Tensor,
    labels: Tensor,
    query: Tensor,
    *,
    num_classes: int,
    neighbors: int = NEIGHBORS,
    temperature: float = TEMPERATURE,
) -> Tensor:
    """Sums exp(cosine similarity / temperature) over the nearest support images, per class.

    `support` (n, D) has classes int64 (n,) of K; `query` is (m, D). The lower the
    temperature, the more the nearest count.

    Returns:
        float32 (m, K); the largest is the predicted class.
    """
    directions = F.normalize(support.float(), dim=-1).T  # (D, n)
    scores = torch.zeros(len(query), num_classes, device=query.device)
    rows = max(1, _MAX_SIMILARITIES // len(support))
    for part, of_part in zip(query.split(rows), scores.split(rows), strict=True):
        similarities = F.normalize(part.float(), dim=-1) @ directions  # (r, n)
        nearest = similarities.topk(min(neighbors, len(support)), dim=-1)  # values and indices (r, k)
        of_part.scatter_add_(1, labels[nearest.indices], (nearest.values / temperature).exp())
    return scores
