"""The contrast alone: two views of each image, none masked (SimCLR, arXiv 2002.05709), for any encoder.

Departures from the paper: groups of images in place of the batch, and the projection head of `contrastive_mae`.
Shapes: B rows of a micro-batch, views 2j and 2j + 1 of image j; C channels, H W pixels; d projected width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import Unpack

from mae_vit.core.batch import Batch
from mae_vit.core.image_rows import Picture
from mae_vit.models.encoders.base import Encoder, pool_tokens
from mae_vit.objectives.config import ContrastiveConfig
from mae_vit.objectives.contrast import Contrast, contrast_metrics, logged, no_sums
from mae_vit.objectives.objective import Objective, ObjectiveOutput, Pixels


class Contrastive(Objective):
    """Distinguishes images by the mean of the encoder's image tokens."""

    def __init__(self, encoder: Encoder, config: ContrastiveConfig, **pixels: Unpack[Pixels]) -> None:
        super().__init__(encoder, **pixels)
        self.projection = Contrast(encoder.embed_dim, config)

    def project(self, views: Tensor) -> Tensor:
        """Maps normalized views (B, C, H, W) to float32 (B, d) of length 1."""
        z: Tensor = self.projection(pool_tokens(self.encoder, self.encoder.forward_features(views), "mean"))
        return z

    def forward(self, batch: Batch) -> ObjectiveOutput:
        """Computes the contrast of whole groups."""
        loss, sums = self.projection.compare(self.project(self.normalize(batch.images)))
        return ObjectiveOutput(loss, logged(sums))

    def evaluation_sums(self, batch: Batch) -> dict[str, Tensor]:
        """Sums the contrast of two corners of each plain image; only whole groups count."""
        images = self.normalize(batch.images[: self.projection.whole(len(batch.images))])
        if not len(images):
            return no_sums(images)
        return self.projection.compare(self.project(two_corners(images)))[1]

    def evaluation_metrics(self, sums: dict[str, float]) -> dict[str, float]:
        """Returns the contrast's metrics; nothing without a whole group."""
        metrics = contrast_metrics(sums)
        return {"loss": metrics["contrast_loss"], **metrics} if metrics else {}

    def pictures(self, batch: Batch) -> list[Picture]:
        """Shows the first corner, the second corner that is most like it, and the original."""
        z = self.project(two_corners(self.normalize(batch.images)))
        nearest = (z[::2] @ z[1::2].T).argmax(dim=1)
        images = self.unit(batch.images)
        corners = two_corners(images).clamp(0, 1)
        return [
            Picture("upper left", corners[::2]),
            Picture("most similar lower right", corners[1::2][nearest]),
            Picture("original", images),
        ]


def two_corners(images: Tensor) -> Tensor:
    """Enlarges the upper left and the lower right of each image, three quarters of its sides, as its two views.

    (B, C, H, W) -> (2B, C, H, W), partners side by side.
    """
    size = images.shape[-2:]
    height, width = (-(-3 * side // 4) for side in size)
    corners = images[..., :height, :width], images[..., -height:, -width:]
    return torch.stack([F.interpolate(each, size, mode="bilinear") for each in corners], dim=1).flatten(0, 1)
