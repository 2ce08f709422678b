"""Masked patch prediction: the mean colors of corrupted patches (ViT Sec. 4.6, App. B.1.2).

Shapes: B batch, C channels, N patches, M corrupted patches, P patch size, D width, K classes, Q classifications of a
patch: one, or with more than 3 bands one for each band.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import Unpack

from mae_vit.core.batch import Batch
from mae_vit.core.image_rows import Picture
from mae_vit.models.encoders.base import Encoder, init_transformer
from mae_vit.models.masking import KIND_MASK, KIND_RANDOM, Corruption, corrupt, nearest_visible
from mae_vit.models.patches import (
    COLOR_BITS,
    join_bins,
    mean_band_bins,
    mean_color_bins,
    split_bins,
    take_tokens,
    unpatchify,
)
from mae_vit.objectives.config import MaskedPatchConfig
from mae_vit.objectives.objective import Objective, ObjectiveOutput, Pixels
from mae_vit.objectives.reconstruction import masked_pictures, weigh

# The paper's classes are joint colors of 3 channels: 8**3 = 512. More bands would give too many classes.
MOST_JOINT_BANDS = 3


class MaskedPatch(Objective):
    """Classifies the 3-bit mean color of corrupted patches from the encoder's final states.

    With up to 3 bands a class is a color, as in the paper. With more, each band is classified separately, in 8 classes
    (joint classes would be 8**C). Patches without any valid value of a band do not count.
    """

    def __init__(self, encoder: Encoder, config: MaskedPatchConfig, **pixels: Unpack[Pixels]) -> None:
        super().__init__(encoder, **pixels)
        self.mask_ratio = config.corrupt_ratio
        channels = encoder.in_chans
        self._joint = channels <= MOST_JOINT_BANDS
        self._classes = 2 ** (COLOR_BITS * (channels if self._joint else 1))
        self.mask_token = nn.Parameter(torch.zeros(1, 1, encoder.embed_dim))
        self.head = nn.Linear(encoder.embed_dim, (1 if self._joint else channels) * self._classes)
        self.head.apply(init_transformer)
        nn.init.normal_(self.mask_token, std=0.02)

    def predict(self, batch: Batch) -> tuple[Tensor, Corruption]:
        """Corrupts, encodes and predicts; returns (B, M, Q * K) at corrupted positions, and the corruption."""
        corruption = corrupt(batch.keys, self.encoder.num_patches, self.mask_ratio)
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

    def _all_classes(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """Returns the classes of all patches, int64 (B, N, Q), and which are known, bool (B, N, Q) or None for all."""
        patch_size, known = self.encoder.patch_size, None
        if self.bands.eight_bit:
            bins = mean_color_bins(batch.images, patch_size)  # (B, N, C)
        else:
            bins, known = mean_band_bins(self.unit(batch.images), patch_size, self.bands.valid(batch.images))
        if not self._joint:
            return bins, known
        return join_bins(bins)[..., None], None if known is None else known.all(dim=-1, keepdim=True)

    def _aligned(self, prediction: Tensor, batch: Batch, ids: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Returns logits (B, M, Q, K), classes (B, M, Q), and which are known, bool (B, M, Q) or None for all."""
        logits = prediction.float().unflatten(-1, (-1, self._classes))  # (B, M, Q, K)
        classes, known = self._all_classes(batch)
        return logits, take_tokens(classes, ids), None if known is None else take_tokens(known, ids)

    def _losses(self, logits: Tensor, classes: Tensor, known: Tensor | None, reduction: str) -> Tensor:
        """Computes the mean or sum of cross-entropies over known classes; all images have the same weight."""
        if known is None:
            return F.cross_entropy(logits.flatten(0, 2), classes.flatten(), reduction=reduction)
        each = F.cross_entropy(logits.flatten(0, 2), classes.flatten(), reduction="none")
        weighed = weigh(each.view(classes.shape), known)  # (B, M, Q)
        return weighed.mean() if reduction == "mean" else weighed.sum()

    def _hits(
        self, logits: Tensor, classes: Tensor, known: Tensor | None, corruption: Corruption
    ) -> dict[str, Tensor]:
        """Counts known classes on [mask] positions, and the right answers there."""
        on_mask = (corruption.kind == KIND_MASK)[..., None].expand_as(classes)  # (B, M, Q)
        on_mask = on_mask if known is None else on_mask & known
        return {
            "on_mask": on_mask.sum().float(),
            "hits": ((logits.argmax(dim=-1) == classes) & on_mask).sum().float(),
        }

    def forward(self, batch: Batch) -> ObjectiveOutput:
        """Computes the mean cross-entropy over corrupted positions and bands, and the accuracy on [mask]."""
        prediction, corruption = self.predict(batch)
        aligned = self._aligned(prediction, batch, corruption.ids)
        loss = self._losses(*aligned, reduction="mean")
        with torch.no_grad():
            sums = self._hits(*aligned, corruption)
        return ObjectiveOutput(loss, {"accuracy_on_mask": (sums["hits"], sums["on_mask"])})

    def evaluation_sums(self, batch: Batch) -> dict[str, Tensor]:
        """Sums the loss; counts hits on [mask] positions, for the model and for copies of the nearest visible patch."""
        prediction, corruption = self.predict(batch)
        logits, classes, known = self._aligned(prediction, batch, corruption.ids)
        nearest = nearest_visible(corruption.mask, self.encoder.grid_size).gather(1, corruption.ids)
        everywhere, there = self._all_classes(batch)
        equal = take_tokens(everywhere, nearest) == classes  # (B, M, Q)
        if known is not None and there is not None:
            equal &= known & take_tokens(there, nearest)
        on_mask = (corruption.kind == KIND_MASK)[..., None]  # (B, M, 1)
        return {
            "predicted": torch.tensor(float(classes.numel()), device=classes.device),
            "loss": self._losses(logits, classes, known, reduction="sum"),
            **self._hits(logits, classes, known, corruption),
            "hits_nearest": (equal & on_mask).sum().float(),
        }

    def evaluation_metrics(self, sums: dict[str, float]) -> dict[str, float]:
        """Returns the loss over corrupted positions, and the accuracy and its baseline on [mask] positions."""
        return {
            "loss": sums["loss"] / sums["predicted"],
            "accuracy_on_mask": sums["hits"] / max(sums["on_mask"], 1),
            "accuracy_nearest_visible": sums["hits_nearest"] / max(sums["on_mask"], 1),
        }

    def pictures(self, batch: Batch) -> list[Picture]:
        """Shows masked, predicted, pasted and original images; each patch has one color."""
        prediction, corruption = self.predict(batch)
        logits, _, _ = self._aligned(prediction, batch, corruption.ids)
        everywhere, _ = self._all_classes(batch)
        ids = corruption.ids[..., None].expand(-1, -1, everywhere.shape[-1])  # (B, M, Q)
        classes = everywhere.scatter(1, ids, logits.argmax(dim=-1))  # (B, N, Q)
        p, img_size = self.encoder.patch_size, self.encoder.img_size
        bins = split_bins(classes[..., 0], self.encoder.in_chans) if self._joint else classes  # (B, N, C)
        # Each pixel gets the color at the middle of its patch's bins.
        pixels = ((bins + 0.5) / 2**COLOR_BITS).repeat(1, 1, p * p)  # (B, N, P*P*C)
        predicted = unpatchify(torch.where(corruption.mask[..., None] > 0, pixels, 0.5), p, img_size)
        return masked_pictures(self, batch.images, predicted, corruption.mask, label="predicted colors")
