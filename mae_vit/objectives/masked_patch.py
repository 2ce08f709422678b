"""Masked patch prediction: colors or pixels of corrupted patches (ViT Sec. 4.6, App. B.1.2).

Shapes: B batch, C channels, N patches, M corrupted patches, P patch size, D width, A areas of a patch, K classes, Q
classifications of a patch: one for each area, or with more than 3 bands one for each band of each area.
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
    gather_cells,
    join_bins,
    mean_band_bins,
    mean_color_bins,
    patchify,
    split_bins,
    take_tokens,
    unpatchify,
)
from mae_vit.objectives.config import COLOR_CELLS, MaskedPatchConfig
from mae_vit.objectives.objective import Objective, ObjectiveOutput, Pixels
from mae_vit.objectives.reconstruction import (
    error_sums,
    local_average,
    masked_pictures,
    psnr_metrics,
    reconstruction_pictures,
    weigh,
)

# The paper's classes are joint colors of 3 channels: 8**3 = 512. More bands would give too many classes.
MOST_JOINT_BANDS = 3


class MaskedPatch(Objective):
    """Predicts the content of corrupted patches from the encoder's final states; subclasses have the targets."""

    def __init__(
        self, encoder: Encoder, config: MaskedPatchConfig, num_outputs: int, **pixels: Unpack[Pixels]
    ) -> None:
        """Adds the [mask] embedding and the prediction head to `encoder`."""
        super().__init__(encoder, **pixels)
        self.config, self.mask_ratio = config, config.corrupt_ratio
        self.mask_token = nn.Parameter(torch.zeros(1, 1, encoder.embed_dim))
        self.head = nn.Linear(encoder.embed_dim, num_outputs)
        self.head.apply(init_transformer)
        nn.init.normal_(self.mask_token, std=0.02)

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


class MaskedColors(MaskedPatch):
    """Classifies the 3-bit colors of the `cells` x `cells` areas of a patch in parallel.

    One area is the paper's mean color; 4 x 4 areas are its second variant. With up to 3 bands a class is a color,
    as in the paper. With more, each band is classified separately, in 8 classes (joint classes would be 8**C).
    Areas without any valid value of a band do not count.
    """

    def __init__(self, encoder: Encoder, config: MaskedPatchConfig, **pixels: Unpack[Pixels]) -> None:
        """Adds the [mask] embedding and the prediction head to `encoder`."""
        channels, cells = encoder.in_chans, COLOR_CELLS[config.target]
        joint = channels <= MOST_JOINT_BANDS
        classes = 2 ** (COLOR_BITS * (channels if joint else 1))
        super().__init__(encoder, config, cells * cells * (1 if joint else channels) * classes, **pixels)
        self._cells, self._joint, self._classes = cells, joint, classes

    def _all_classes(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """Returns the classes of all patches, int64 (B, N, Q), and which are known, bool (B, N, Q) or None for all."""
        area = self.encoder.patch_size // self._cells
        known: Tensor | None = None
        if self.bands.eight_bit:
            bins = mean_color_bins(batch.images, area)  # (B, N * A, C)
        else:
            bins, known = mean_band_bins(self.unit(batch.images), area, self.valid(batch.images))
        if self._joint:
            bins = join_bins(bins)[..., None]  # (B, N * A, 1)
            known = None if known is None else known.all(dim=-1, keepdim=True)

        def of_patches(values: Tensor) -> Tensor:
            return gather_cells(values, self.encoder.grid_size, self._cells).flatten(2)  # (B, N, Q)

        return of_patches(bins), None if known is None else of_patches(known)

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
        """Computes the mean cross-entropy over corrupted positions, areas and bands, and the accuracy on [mask]."""
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
        """Shows masked, predicted, pasted and original images; each area has one color."""
        prediction, corruption = self.predict(batch)
        encoder, cells = self.encoder, self._cells
        logits, _, _ = self._aligned(prediction, batch, corruption.ids)
        everywhere, _ = self._all_classes(batch)
        ids = corruption.ids[..., None].expand(-1, -1, everywhere.shape[-1])  # (B, M, Q)
        classes = everywhere.scatter(1, ids, logits.argmax(dim=-1))  # (B, N, Q)
        p, img_size, channels = encoder.patch_size, encoder.img_size, encoder.in_chans
        bins = split_bins(classes, channels) if self._joint else classes.unflatten(2, (-1, channels))
        # Each pixel gets the color at the middle of its area's bins.
        colors = ((bins + 0.5) / 2**COLOR_BITS).unflatten(2, (cells, cells))
        pixels = colors.repeat_interleave(p // cells, 2).repeat_interleave(p // cells, 3).flatten(2)
        predicted = unpatchify(torch.where(corruption.mask[..., None] > 0, pixels, 0.5), p, img_size)
        return masked_pictures(self, batch.images, predicted, corruption.mask, label="predicted colors")


class MaskedPixels(MaskedPatch):
    """L2 regression of all normalized pixels of a patch (the paper's third variant)."""

    def __init__(self, encoder: Encoder, config: MaskedPatchConfig, **pixels: Unpack[Pixels]) -> None:
        """Adds the [mask] embedding and the prediction head to `encoder`."""
        super().__init__(encoder, config, encoder.patch_size**2 * encoder.in_chans, **pixels)

    def _errors(self, prediction: Tensor, batch: Batch, corruption: Corruption) -> Tensor:
        """Computes the mean squared error of each corrupted patch: (B, M)."""
        images, valid = self.normalize(batch.images), self.valid_patches(batch.images)
        target = take_tokens(patchify(images, self.encoder.patch_size), corruption.ids)
        errors = (prediction.float() - target).square()  # (B, M, P*P*C)
        return weigh(errors, None if valid is None else take_tokens(valid, corruption.ids)).mean(dim=-1)

    def _whole(self, prediction: Tensor, corruption: Corruption, images: Tensor) -> Tensor:
        """Returns the true patches with the prediction at corrupted positions: (B, N, P*P*C)."""
        ids = corruption.ids[..., None].expand_as(prediction)  # (B, M, P*P*C)
        return patchify(images, self.encoder.patch_size).scatter(1, ids, prediction.float())

    def forward(self, batch: Batch) -> ObjectiveOutput:
        """Computes the mean squared error over corrupted positions."""
        prediction, corruption = self.predict(batch)
        return ObjectiveOutput(self._errors(prediction, batch, corruption).mean())

    def evaluation_sums(self, batch: Batch) -> dict[str, Tensor]:
        """Sums the loss over corrupted positions, and squared errors of model and baseline on [mask] positions."""
        prediction, corruption = self.predict(batch)
        images, valid = self.normalize(batch.images), self.valid_patches(batch.images)
        on_mask = torch.zeros_like(corruption.mask)  # (B, N)
        on_mask.scatter_(1, corruption.ids, (corruption.kind == KIND_MASK).to(on_mask.dtype))
        baseline = local_average(images, corruption.mask, self.encoder, valid)
        whole = self._whole(prediction, corruption, images)
        errors = self._errors(prediction, batch, corruption)
        return {
            "predicted": torch.tensor(float(errors.numel()), device=errors.device),
            "loss": errors.sum(),
            **error_sums(self, images, (whole, baseline), on_mask, valid),
        }

    def evaluation_metrics(self, sums: dict[str, float]) -> dict[str, float]:
        """Returns the loss over corrupted positions, and PSNR of model and local average on [mask] positions."""
        return {"loss": sums["loss"] / sums["predicted"], **psnr_metrics(sums)}

    def pictures(self, batch: Batch) -> list[Picture]:
        """Shows masked, predicted, pasted and original images; visible patches are unchanged."""
        prediction, corruption = self.predict(batch)
        whole = self._whole(prediction, corruption, self.normalize(batch.images))
        return reconstruction_pictures(self, batch.images, whole, corruption.mask)


def masked_patch(encoder: Encoder, config: MaskedPatchConfig, **pixels: Unpack[Pixels]) -> MaskedPatch:
    """Builds the objective for the config's target."""
    kind = MaskedPixels if config.target == "pixels_l2" else MaskedColors
    return kind(encoder, config, **pixels)
