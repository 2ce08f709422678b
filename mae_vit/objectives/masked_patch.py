"""Masked patch prediction: colors or pixels of corrupted patches (ViT Sec. 4.6, App. B.1.2).

Shapes: B images, N patches, M corrupted patches, D width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from mae_vit.core.batch import Batch
from mae_vit.core.image_rows import Picture
from mae_vit.models.encoders.base import Encoder, init_transformer
from mae_vit.models.masking import KIND_MASK, KIND_RANDOM, Corruption, corrupt
from mae_vit.models.patches import take_tokens
from mae_vit.objectives.config import MaskedPatchConfig
from mae_vit.objectives.masked_patch_targets import make_target
from mae_vit.objectives.objective import Objective, ObjectiveOutput, Pixels


class MaskedPatch(Objective):
    """Predicts the content of corrupted patches from the encoder's final states."""

    def __init__(self, encoder: Encoder, config: MaskedPatchConfig, **pixels: Unpack[Pixels]) -> None:
        """Adds the [mask] embedding and the prediction head to `encoder`."""
        super().__init__(encoder, **pixels)
        self.config, self.mask_ratio = config, config.corrupt_ratio
        self.mask_token = nn.Parameter(torch.zeros(1, 1, encoder.embed_dim))
        self.target = make_target(self, config.target)
        self.head = nn.Linear(encoder.embed_dim, self.target.num_outputs)
        self.head.apply(init_transformer)
        nn.init.normal_(self.mask_token, std=0.02)

    def forward(self, batch: Batch) -> ObjectiveOutput:
        """Computes the mean loss over all corrupted positions."""
        prediction, corruption = self.predict(batch)
        loss = self.target.loss(prediction, batch, corruption)
        with torch.no_grad():
            values = self.target.values(prediction, batch, corruption)
        return ObjectiveOutput(loss, values)

    def predict(self, batch: Batch) -> tuple[Tensor, Corruption]:
        """Corrupts, encodes and predicts; returns (B, M, num_outputs) at corrupted positions, and the corruption."""
        corruption = corrupt(
            batch.keys,
            self.encoder.num_patches,
            corrupt_ratio=self.config.corrupt_ratio,
            mask_share=self.config.mask_share,
            random_share=self.config.random_share,
        )
        tokens = self.encoder.embed_patches(self.normalize(batch.images))  # (B, N, D)
        encoded = self.encoder.forward_replaced(self.replace(tokens, corruption))  # (B, k + N, D)
        patches = encoded[:, self.encoder.num_prefix_tokens :]
        return self.head(take_tokens(patches, corruption.ids)), corruption

    def replace(self, tokens: Tensor, corruption: Corruption) -> Tensor:
        """Corrupts patch embeddings (B, N, D), before positions: 80 % [mask], 10 % another patch's, 10 % kept."""
        width = tokens.shape[-1]
        kind = corruption.kind[..., None]  # (B, M, 1)
        source = corruption.source[..., None].expand(-1, -1, width)  # (B, M, D)
        ids = corruption.ids[..., None].expand(-1, -1, width)  # (B, M, D)
        replaced = torch.where(kind == KIND_RANDOM, tokens.gather(1, source), tokens.gather(1, ids))
        replaced = torch.where(kind == KIND_MASK, self.mask_token.to(tokens.dtype), replaced)
        return tokens.scatter(1, ids, replaced)  # (B, N, D)

    def evaluation_sums(self, batch: Batch) -> dict[str, Tensor]:
        """Returns the target's sums over the batch."""
        prediction, corruption = self.predict(batch)
        return self.target.sums(prediction, batch, corruption)

    def evaluation_metrics(self, sums: dict[str, float]) -> dict[str, float]:
        """Returns the metrics of the target."""
        return self.target.metrics(sums)

    def pictures(self, batch: Batch) -> list[Picture]:
        """Shows masked, predicted, pasted and original images."""
        prediction, corruption = self.predict(batch)
        return self.target.pictures(prediction, batch, corruption)
