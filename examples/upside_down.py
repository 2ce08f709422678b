"""An objective of one's own: is an image upside down? Rotation prediction (arXiv 1803.07728) by half a turn.

    mae-vit pretrain mae_digits 'run.plugins=[examples/upside_down.py]' "objective={name: upside_down}" run.name=turned

Shapes: B batch, D width.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import Unpack

from mae_vit.core.batch import Batch
from mae_vit.core.image_rows import Picture
from mae_vit.core.keyed_rng import RngStream
from mae_vit.models.encoders.base import Encoder, init_transformer, pool_tokens
from mae_vit.objectives import ObjectiveSection, register_objective
from mae_vit.objectives.objective import Objective, ObjectiveOutput, Pixels


class UpsideDownConfig(ObjectiveSection):
    """The `objective` section of a config: it has no options, and takes every encoder."""

    built_by: ClassVar[str] = f"{__name__}:UpsideDown"
    name: Literal["upside_down"]


class UpsideDown(Objective):
    """Cross-entropy of a linear head on the mean of the patches: 1 if the image was turned."""

    def __init__(self, encoder: Encoder, config: UpsideDownConfig, **pixels: Unpack[Pixels]) -> None:
        """Adds the head to `encoder`."""
        super().__init__(encoder, **pixels)
        self.head = nn.Linear(encoder.embed_dim, 2)
        self.head.apply(init_transformer)

    def predict(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Turns half of the images, drawn by their keys: logits float32 (B, 2), targets int64 (B,)."""
        turned = batch.keys.random_uint32(RngStream.PLUGIN, 1)[:, 0] & 1  # (B,)
        images = torch.where(turned[:, None, None, None] > 0, batch.images.flip(2, 3), batch.images)
        tokens = self.encoder.forward_features(self.normalize(images))
        return self.head(pool_tokens(self.encoder, tokens, "mean")).float(), turned

    def forward(self, batch: Batch) -> ObjectiveOutput:
        """Computes the mean cross-entropy."""
        return ObjectiveOutput(F.cross_entropy(*self.predict(batch)))

    def evaluation_sums(self, batch: Batch) -> dict[str, Tensor]:
        """Sums loss and hits over images."""
        logits, turned = self.predict(batch)
        return {
            "images": torch.tensor(float(len(turned)), device=logits.device),
            "loss": F.cross_entropy(logits, turned, reduction="sum"),
            "hits": (logits.argmax(dim=1) == turned).sum().float(),
        }

    def evaluation_metrics(self, sums: dict[str, float]) -> dict[str, float]:
        """Returns the loss, and the accuracy."""
        return {name: sums[key] / sums["images"] for name, key in (("loss", "loss"), ("accuracy", "hits"))}

    def pictures(self, batch: Batch) -> list[Picture]:
        """Shows the images."""
        return [Picture("original", self.unit(batch.images))]


register_objective(UpsideDownConfig)
