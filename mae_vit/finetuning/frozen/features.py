"""Computes the features of a frozen encoder."""

from __future__ import annotations

import numpy as np
import torch

from mae_vit.core.progress import progress
from mae_vit.data.batches.augmented import AugmentedSource
from mae_vit.finetuning.data import FinetuneData
from mae_vit.finetuning.results.predict import Predictor
from mae_vit.runtime.collectives import sum_over_ranks
from mae_vit.weights.feature_encoder import FeatureEncoder


@torch.no_grad()
def read_features(
    encoder: FeatureEncoder,
    data: FinetuneData,
    source: AugmentedSource,
    samples: np.ndarray,
    predictor: Predictor,
) -> torch.Tensor:
    """Encodes images, and pools as the encoder does; collective.

    Each rank encodes every world_size-th image.

    Args:
        encoder: ours, or one of others; on the device; it is left in evaluation mode.
        data: makes the batches.
        source: reads images without augmentation.
        samples: int64 (n,), places in `source`.
        predictor: ranks, device, precision and batch size.

    Returns:
        float32 (n, D) on the device, the same on all ranks.
    """
    encoder.eval()
    ranks, total = predictor.ranks, len(samples)
    features = torch.zeros(total, encoder.num_features, device=predictor.device)
    rows = []
    bar = progress(
        total=len(range(ranks.rank, total, ranks.world_size)),
        desc="encoding",
        unit=" images",
        delay=2,
        leave=False,
        disable=ranks.rank > 0,
    )
    with predictor.autocast(), bar:
        for batch in data.fixed(source, samples, ranks, predictor.batch_size):
            images = encoder.normalize(batch.to(predictor.device).images)
            rows.append(encoder.features(images).float())
            bar.update(len(rows[-1]))
    if rows:
        features[ranks.rank :: ranks.world_size] = torch.cat(rows)
    return sum_over_ranks(features, ranks)
