"""Computes the similarity of position embeddings, and principal components of patch features.

Shapes: n images, N patches, D width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


@torch.no_grad()
def position_similarity(pos_embed: Tensor, class_tokens: int = 1) -> Tensor:
    """Computes the cosine similarity of all pairs of position embeddings (ViT Sec. 4.5, Fig. 7 center).

    (1, k + N, D), the k rows of class tokens first, -> float32 (N, N).
    """
    directions = F.normalize(pos_embed[0, class_tokens:].float(), dim=-1)
    return directions @ directions.T


def feature_components(features: Tensor, count: int = 3) -> tuple[Tensor, Tensor]:
    """Projects patch features of several images onto joint principal components (DINOv2, arXiv 2304.07193, Fig. 1).

    (n, N, D) -> float32 (n, N, count), the largest component first; and each one's share of the variance (count,). The
    largest weight of a component is made positive, so that equal features give equal pictures.
    """
    flat = features.detach().double().cpu().flatten(0, 1)
    centered = flat - flat.mean(dim=0)
    values, vectors = torch.linalg.eigh(centered.T @ centered)
    directions = vectors[:, -count:].flip(1)
    directions = directions * directions.gather(0, directions.abs().argmax(dim=0, keepdim=True)).sign()
    shares = values[-count:].flip(0) / values.sum().clamp(min=torch.finfo(torch.float64).tiny)
    return (centered @ directions).float().unflatten(0, features.shape[:2]), shares.float()
