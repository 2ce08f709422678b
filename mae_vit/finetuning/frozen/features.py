"""Features of a frozen encoder."""

from __future__ import annotations

import numpy as np
import torch

from mae_vit.core.progress import progress
from mae_vit.data.batches.sources import Source
from mae_vit.finetuning.data import FinetuneData
from mae_vit.finetuning.models.classifiers import ViTClassifier
from mae_vit.finetuning.results.predict import Predictor
from mae_vit.models.attention import choose_attention
from mae_vit.models.vit import pooled
from mae_vit.runtime.collectives import sum_over_ranks


@torch.no_grad()
def read_features(
    model: ViTClassifier, data: FinetuneData, source: Source, samples: np.ndarray, predictor: Predictor
) -> torch.Tensor:
    """Reads [CLS] or the mean of the patch tokens, normed; each rank its share; collective.

    Args:
        model: on the device; left in evaluation mode.
        data: of the run.
        source: of images without augmentation.
        samples: their numbers (n,) in it.
        predictor: where images are encoded.

    Returns:
        float32 (n, D) on the device, the same on all ranks.
    """
    choose_attention(model, predictor.device)
    model.eval()
    ranks, total = predictor.ranks, len(samples)
    features = torch.zeros(total, model.encoder.embed_dim, device=predictor.device)
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
            tokens = model.encoder.forward_features(model.normalize(batch.to(predictor.device).images))
            rows.append(model.fc_norm(pooled(tokens, model.pool)).float())
            bar.update(len(rows[-1]))
    if rows:
        features[ranks.rank :: ranks.world_size] = torch.cat(rows)
    return sum_over_ranks(features, ranks)
