"""Masked patch prediction: the mean color of corrupted patches (ViT Sec. 4.6, App. B.1.2)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from mae_vit.batch import Batch
from mae_vit.encoder import ViTEncoder, init_transformer
from mae_vit.masking import KIND_MASK, KIND_RANDOM, Corruption, corrupt, nearest_visible
from mae_vit.objectives.base import Objective, ObjectiveOutput, ObjectiveSection, Picture
from mae_vit.patches import class_colors, constant_patches, mean_color_classes, unpatchify


class MaskedPatchConfig(ObjectiveSection):
    """Options of the `masked_patch` objective; defaults are ViT App. B.1.2's."""

    name: Literal["masked_patch"]
    target: Literal["mean_color"] = "mean_color"
    corrupt_ratio: float = Field(default=0.5, gt=0, lt=1)
    mask_share: float = Field(default=0.8, ge=0, le=1)
    random_share: float = Field(default=0.1, ge=0, le=1)

    def check(self, *, grid_size: tuple[int, int], patch_size: int, in_chans: int) -> None:
        """Raises ValueError, named by key, for what only shows together with the model."""
        num_patches = grid_size[0] * grid_size[1]
        if not 0 < round(self.corrupt_ratio * num_patches) < num_patches:
            raise ValueError(
                f"corrupt_ratio={self.corrupt_ratio} corrupts none or all of {num_patches} patches"
            )
        if self.mask_share + self.random_share > 1:
            raise ValueError(f"mask_share={self.mask_share} + random_share={self.random_share} exceed 1")

    def build(self, encoder: ViTEncoder, *, mean: Sequence[float], std: Sequence[float]) -> MaskedPatch:
        """Builds the objective around an encoder."""
        return MaskedPatch(encoder, self, mean=mean, std=std)


class MaskedPatch(Objective):
    """Predicts the 3-bit mean color of corrupted patches from the encoder's final states."""

    def __init__(
        self,
        encoder: ViTEncoder,
        config: MaskedPatchConfig,
        *,
        mean: Sequence[float],
        std: Sequence[float],
    ) -> None:
        """Adds the [mask] embedding and the color head to `encoder`."""
        super().__init__(encoder, mean=mean, std=std)
        self.config = config
        self.mask_token = nn.Parameter(torch.zeros(1, 1, encoder.embed_dim))
        self.color_head = nn.Linear(encoder.embed_dim, 8**encoder.in_chans)
        self.color_head.apply(init_transformer)
        nn.init.normal_(self.mask_token, std=0.02)

    def forward(self, batch: Batch) -> ObjectiveOutput:
        """Computes the mean cross-entropy over all corrupted positions."""
        logits, corruption = self.predict(batch)
        classes = mean_color_classes(batch.images, self.encoder.patch_size).gather(1, corruption.ids)
        loss = F.cross_entropy(logits.flatten(0, 1), classes.flatten())
        with torch.no_grad():
            on_mask = corruption.kind == KIND_MASK
            right = (logits.argmax(dim=-1) == classes) & on_mask
        return ObjectiveOutput(loss, {"accuracy_on_mask": (right.sum(), on_mask.sum())})

    def predict(self, batch: Batch) -> tuple[Tensor, Corruption]:
        """Corrupts, encodes and predicts.

        Returns:
            float32 logits (B, M, 8**C) at the M corrupted positions, and the corruption.
        """
        corruption = corrupt(
            batch.keys,
            self.encoder.num_patches,
            corrupt_ratio=self.config.corrupt_ratio,
            mask_share=self.config.mask_share,
            random_share=self.config.random_share,
        )
        tokens = self.encoder.embed_patches(self.normalize(batch.images))
        encoded = self.encoder.forward_replaced(self.replace(tokens, corruption))
        ids = corruption.ids[..., None].expand(-1, -1, encoded.shape[-1])
        return self.color_head(encoded[:, 1:].gather(1, ids)).float(), corruption

    def replace(self, tokens: Tensor, corruption: Corruption) -> Tensor:
        """Replaces patch embeddings (before positions): 80 % [mask], 10 % another patch's, 10 % kept.

        Args:
            tokens: (B, N, D), embeddings of the original patches.
            corruption: what to replace by what.

        Returns:
            (B, N, D).
        """
        width = tokens.shape[-1]
        kind = corruption.kind[..., None]
        source = corruption.source[..., None].expand(-1, -1, width)
        ids = corruption.ids[..., None].expand(-1, -1, width)
        replaced = torch.where(kind == KIND_RANDOM, tokens.gather(1, source), tokens.gather(1, ids))
        replaced = torch.where(kind == KIND_MASK, self.mask_token.to(tokens.dtype), replaced)
        return tokens.scatter(1, ids, replaced)

    def evaluation_sums(self, batch: Batch) -> dict[str, Tensor]:
        """Hits on [mask] positions, of the model and of copying the nearest visible patch."""
        logits, corruption = self.predict(batch)
        all_classes = mean_color_classes(batch.images, self.encoder.patch_size)
        classes = all_classes.gather(1, corruption.ids)
        on_mask = corruption.kind == KIND_MASK
        nearest = nearest_visible(corruption.mask, self.encoder.grid_size).gather(1, corruption.ids)
        copied = all_classes.gather(1, nearest)
        return {
            "corrupted": torch.tensor(float(classes.numel()), device=classes.device),
            "loss": F.cross_entropy(logits.flatten(0, 1), classes.flatten(), reduction="sum"),
            "on_mask": on_mask.sum().float(),
            "hits": ((logits.argmax(dim=-1) == classes) & on_mask).sum().float(),
            "hits_nearest": ((copied == classes) & on_mask).sum().float(),
        }

    def evaluation_metrics(self, sums: dict[str, float]) -> dict[str, float]:
        """Loss over corrupted positions; accuracy on [mask] positions beside the copying baseline."""
        return {
            "loss": sums["loss"] / sums["corrupted"],
            "accuracy_on_mask": sums["hits"] / max(sums["on_mask"], 1),
            "accuracy_nearest_visible": sums["hits_nearest"] / max(sums["on_mask"], 1),
        }

    def pictures(self, batch: Batch) -> list[Picture]:
        """Shows masked, predicted, pasted, original; a color stands for a whole patch."""
        logits, corruption = self.predict(batch)
        p, img_size, channels = self.encoder.patch_size, self.encoder.img_size, self.encoder.in_chans
        classes = mean_color_classes(batch.images, p).scatter(1, corruption.ids, logits.argmax(dim=-1))
        colors = constant_patches(class_colors(classes, channels) / 255, p, img_size)
        hidden = unpatchify(corruption.mask[..., None].expand(-1, -1, p * p), p, img_size)
        original = batch.images.float() / 255
        return [
            Picture("masked", original * (1 - hidden) + 0.5 * hidden),
            Picture("predicted mean colors", colors * hidden + 0.5 * (1 - hidden)),
            Picture("pasted", original * (1 - hidden) + colors * hidden),
            Picture("original", original),
        ]
