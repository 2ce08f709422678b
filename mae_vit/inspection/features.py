"""An encoder's features: neighbors, a map, and a linear probe of each block.

Shapes: n images, L blocks, D width, K classes.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from mae_vit.evaluation.few_shot import draw_shots, least_squares_scores
from mae_vit.inspection.images import Samples
from mae_vit.weights.encoder import PretrainedEncoder

_BATCH = 128
# t-SNE's perplexity (van der Maaten & Hinton 2008 advise 5 to 50).
_PERPLEXITY = 30.0


@torch.no_grad()
def layer_features(model: PretrainedEncoder, samples: Samples) -> Tensor:
    """Encodes all images and keeps each block's read-out, behind the encoder's final norm.

    Args:
        model: on the device that computes.
        samples: images.

    Returns:
        float32 (L, n, D) on the CPU, of the class tokens or the patch tokens, their mean, as the model reads.
    """
    encoder = model.encoder
    parts = []
    for images in _batches(samples.images):
        layers = encoder.forward_intermediates(
            model.normalize(images.to(encoder.cls_token.device)),
            norm=True,
            output_fmt="NLC",
            return_prefix_tokens=True,
            intermediates_only=True,
        )
        read = [(prefix if model.pool == "cls" else patches).mean(dim=1) for patches, prefix in layers]
        parts.append(torch.stack([model.fc_norm(one).float().cpu() for one in read]))
    return torch.cat(parts, dim=1)


def _batches(images: Tensor) -> Iterator[Tensor]:
    for start in range(0, len(images), _BATCH):
        yield images[start : start + _BATCH]


# With fewer images to score, an accuracy means little.
FEWEST_SCORED = 10


def probe_by_layer(
    features: Tensor, labels: Tensor, *, num_classes: int, shots: int = 25
) -> tuple[list[float], float]:
    """Scores each block's features by regularized least squares (ViT Sec. 4.1), the linear probe in closed form.

    Args:
        features: (L, n, D).
        labels: int64 (n,), -1 without a label.
        num_classes: K.
        shots: images of each class to fit on, at most half of those there are.

    Returns:
        Top-1 of the rest, by block, empty without labels of two classes or `FEWEST_SCORED` images to score; and
        the score of always predicting their most frequent class.
    """
    support, query = draw_shots(labels.numpy(), shots=shots, queries=len(labels))
    if len(np.unique(labels.numpy()[support])) < 2 or len(query) < FEWEST_SCORED:
        return [], 0.0
    top1 = []
    for block in features:
        scores = least_squares_scores(block[support], labels[support], block[query], num_classes=num_classes)
        top1.append(float((scores.argmax(dim=-1) == labels[query]).double().mean()))
    return top1, float(np.bincount(labels.numpy()[query]).max()) / len(query)


def nearest_images(features: Tensor, queries: int, neighbors: int) -> tuple[Tensor, Tensor]:
    """Finds the images most like the first few, by cosine similarity, themselves apart.

    Args:
        features: (n, D).
        queries: how many are asked for, the first.
        neighbors: of each, at most n - 1.

    Returns:
        Places int64 (queries, k) and similarities (queries, k), the nearest first.
    """
    directions = F.normalize(features.float(), dim=-1)
    similarity = directions[:queries] @ directions.T
    similarity.fill_diagonal_(-torch.inf)
    nearest = similarity.topk(min(neighbors, len(features) - 1), dim=-1)
    return nearest.indices, nearest.values


def project(features: Tensor) -> np.ndarray:
    """Lays features out in the plane by t-SNE, from their principal components: float32 (n, 2).

    The same for the same features: nothing is drawn.
    """
    # Takes seconds to import; few ask.
    from sklearn.manifold import TSNE

    rows = features.double().numpy()
    rows = (rows - rows.mean(axis=0)) / np.maximum(rows.std(axis=0), 1e-6)
    perplexity = min(_PERPLEXITY, (len(rows) - 1) / 3)
    points: np.ndarray = TSNE(perplexity=perplexity, init="pca", random_state=0).fit_transform(rows)
    return points.astype(np.float32)
