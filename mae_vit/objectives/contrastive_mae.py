"""MAE with a contrast between two masked views of each image: CAN (arXiv 2210.16870) without its noise branch.

Shapes: B rows of a micro-batch, views 2j and 2j + 1 of image j; D width; d projected width; k prefix tokens; N_keep
visible patches.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from typing_extensions import Unpack

from mae_vit.core.batch import Batch
from mae_vit.models.encoders.base import Encoder, pool_tokens
from mae_vit.objectives.config import ContrastiveMAEConfig
from mae_vit.objectives.contrast import VIEWS, Contrast, contrast_metrics, logged, no_sums
from mae_vit.objectives.mae import MAE
from mae_vit.objectives.objective import ObjectiveOutput, Pixels


class ContrastiveMAE(MAE):
    """MAE with a head that distinguishes images by the mean of their visible tokens.

    It needs no teacher, no queue and no second forward pass: both views are rows of MAE's batch.
    """

    def __init__(self, encoder: Encoder, config: ContrastiveMAEConfig, **pixels: Unpack[Pixels]) -> None:
        super().__init__(encoder, config, **pixels)
        self.contrast_weight = config.contrast_weight
        self.projection = Contrast(encoder.embed_dim, config)

    def project(self, encoded: Tensor) -> Tensor:
        """Maps encoded views (B, k + N_keep, D) to float32 (B, d) of length 1; class tokens are not used."""
        z: Tensor = self.projection(pool_tokens(self.encoder, encoded, "mean"))
        return z

    def forward(self, batch: Batch) -> ObjectiveOutput:
        """Computes the reconstruction loss and the contrast of whole groups."""
        reconstruction, encoded = self.encode_and_reconstruct(batch)
        contrast_loss, sums = self.projection.compare(self.project(encoded))
        loss = reconstruction + self.contrast_weight * contrast_loss
        return ObjectiveOutput(loss, logged({"reconstruction_loss": reconstruction * sums[VIEWS], **sums}))

    def evaluation_sums(self, batch: Batch) -> dict[str, Tensor]:
        """Adds the contrast of two masks of each plain image to MAE's sums; only whole groups count."""
        sums = super().evaluation_sums(batch)
        whole = self.projection.whole(len(batch.images))
        if not whole:
            return sums | no_sums(sums["loss"])
        images = self.normalize(batch.images[:whole])
        keys = replace(batch.keys, index=batch.keys.index[:whole])
        masks = [self.draw_masking(keys), self.draw_masking(replace(keys, epoch=keys.epoch + 1))]
        views = [self.project(self.encoder.forward_visible(images, mask.ids_keep)) for mask in masks]
        z = torch.stack(views, dim=1).flatten(0, 1)  # (2 * whole, d), partners side by side
        return sums | self.projection.compare(z)[1]

    def evaluation_metrics(self, sums: dict[str, float]) -> dict[str, float]:
        """Adds the contrast's metrics to MAE's."""
        return super().evaluation_metrics(sums) | contrast_metrics(sums)
