"""SimMIM: predicts masked pixels from the encoder's own tokens by L1 regression (arXiv 2111.09886).

If an encoder's patch embeddings cannot be replaced, a learned color replaces the pixels of masked patches, and the
cells of the encoder's map predict the pixels that they cover.
Shapes: B images, C channels, H W pixels, N patches, n cells of the encoder's map, P patch size, D width, u mask unit.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from mae_vit.core.batch import Batch
from mae_vit.core.errors import InputError
from mae_vit.core.image_rows import Picture
from mae_vit.models.encoders.base import Encoder, init_transformer
from mae_vit.models.masking import unit_masking
from mae_vit.models.patches import patchify, unpatchify
from mae_vit.objectives.config import SimMIMConfig
from mae_vit.objectives.objective import Objective, ObjectiveOutput, Pixels
from mae_vit.objectives.reconstruction import (
    error_sums,
    local_average,
    psnr_metrics,
    reconstruction_pictures,
    weigh,
)


def _check_cells(encoder: Encoder) -> None:
    """Raises InputError, which names the nearest size, if the cells of its map do not fill an image."""
    embed: Any = getattr(getattr(encoder, "network", None), "patch_embed", None)
    # A ViT leaves out pixels beside whole patches. Other networks have strides that are powers of two, and pad.
    patch = embed.patch_size[0] if getattr(embed, "grid_size", None) == encoder.feature_grid else 0
    near = []
    for side, count in zip(encoder.img_size, encoder.feature_grid, strict=True):
        unit = math.lcm(patch or 2 ** round(math.log2(side / count)), encoder.patch_size)
        near.append(max(1, round(side / unit)) * unit if side % (patch or count) else side)
    if near != [*encoder.img_size]:
        size, grid = (" x ".join(map(str, pair)) for pair in (encoder.img_size, encoder.feature_grid))
        raise InputError(
            f"objective.name=simmim: this network's map of {grid} cells does not fill images of {size} px "
            f"(nearest: model.img_size={str(near).replace(' ', '')})"
        )


class SimMIM(Objective):
    """Mask tokens replace masked patches; a linear head predicts pixels with an L1 loss (SimMIM Sec. 3)."""

    def __init__(self, encoder: Encoder, config: SimMIMConfig, **pixels: Unpack[Pixels]) -> None:
        super().__init__(encoder, **pixels)
        self.mask_ratio, self.mask_unit = config.mask_ratio, config.mask_unit
        self._replaces = type(encoder).embed_patches is not Encoder.embed_patches
        width = encoder.embed_dim if self._replaces else encoder.in_chans
        self.mask_token = nn.Parameter(torch.zeros(1, 1, width))
        nn.init.normal_(self.mask_token, std=0.02)
        _check_cells(encoder)
        # Height and width in pixels of a token's prediction.
        rows, columns = encoder.feature_grid
        self._cell = (encoder.img_size[0] // rows, encoder.img_size[1] // columns)
        self.head = nn.Linear(encoder.embed_dim, self._cell[0] * self._cell[1] * encoder.in_chans)
        self.head.apply(init_transformer)

    def draw_mask(self, batch: Batch) -> Tensor:
        """Draws masks (B, N) by the batch's keys, 1 = masked; whole units, the same number in each image."""
        return unit_masking(batch.keys, self.encoder.grid_size, self.mask_ratio, self.mask_unit).mask

    def reconstruct(self, images: Tensor, mask: Tensor) -> Tensor:
        """Predicts all patches, float32: (B, C, H, W) normalized, (B, N) -> (B, N, P*P*C)."""
        if not self._replaces:
            return self._reconstruct_from_pixels(images, mask)
        tokens = self.encoder.embed_patches(images)  # (B, N, D)
        tokens = torch.where(mask[..., None] > 0, self.mask_token.to(tokens.dtype), tokens)
        return self.head(
            self.encoder.forward_replaced(tokens)[:, self.encoder.num_prefix_tokens :]
        ).float()  # (B, N, P*P*C)

    def _reconstruct_from_pixels(self, images: Tensor, mask: Tensor) -> Tensor:
        encoder, p = self.encoder, self.encoder.patch_size
        masked = unpatchify(mask[..., None].expand(-1, -1, p * p), p, encoder.img_size)  # (B, 1, H, W)
        color = self.mask_token.to(images.dtype).view(1, -1, 1, 1)
        cells = self.head(encoder.forward_features(torch.where(masked > 0, color, images))).float()
        return patchify(unpatchify(cells, self._cell, encoder.img_size), p)

    def forward(self, batch: Batch) -> ObjectiveOutput:
        """Computes the mean absolute error over masked patches."""
        mask = self.draw_mask(batch)  # (B, N)
        images, valid = self.normalize(batch.images), self.valid_patches(batch.images)
        return ObjectiveOutput(
            self._absolute_error(self.reconstruct(images, mask), images, mask, valid) / mask.sum()
        )

    def _absolute_error(
        self, prediction: Tensor, images: Tensor, mask: Tensor, valid: Tensor | None
    ) -> Tensor:
        error = (prediction - patchify(images, self.encoder.patch_size)).abs()
        return (weigh(error, valid, mask).mean(dim=-1) * mask).sum()

    def evaluation_sums(self, batch: Batch) -> dict[str, Tensor]:
        """Sums the loss and squared errors on masked patches, for the model and for a local average."""
        mask, images = self.draw_mask(batch), self.normalize(batch.images)
        valid = self.valid_patches(batch.images)
        prediction = self.reconstruct(images, mask)
        baseline = local_average(images, mask, self.encoder, valid)
        sums = error_sums(self, images, (prediction, baseline), mask, valid)
        return {"loss": self._absolute_error(prediction, images, mask, valid), **sums}

    def evaluation_metrics(self, sums: dict[str, float]) -> dict[str, float]:
        """Returns the loss, PSNR on masked patches in dB, and its gain over the local average."""
        return {"loss": sums["loss"] / sums["masked"], **psnr_metrics(sums)}

    def pictures(self, batch: Batch) -> list[Picture]:
        """Shows masked, predicted, pasted and original images."""
        mask, images = self.draw_mask(batch), self.normalize(batch.images)
        return reconstruction_pictures(self, batch.images, self.reconstruct(images, mask), mask)
