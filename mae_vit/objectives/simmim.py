"""SimMIM: predicts masked pixels from the encoder's own tokens by L1 regression (arXiv 2111.09886).

Shapes: B images, C channels, H W pixels, N patches, P patch size, D width, u mask unit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from mae_vit.core.bands import Bands
from mae_vit.core.batch import Batch
from mae_vit.core.image_rows import Picture
from mae_vit.models.masking import (
    count_units,
    num_masked_patches,
    patch_noise,
    random_masking,
    spread_over_units,
)
from mae_vit.models.patches import patchify
from mae_vit.models.vit import ViTEncoder, init_transformer
from mae_vit.objectives.missing import weigh
from mae_vit.objectives.objective import Objective, ObjectiveOutput, ObjectiveSection
from mae_vit.objectives.reconstruction import error_sums, local_average, psnr_metrics, reconstruction_pictures


class SimMIMConfig(ObjectiveSection):
    """Options of the `simmim` objective. The defaults are those of SimMIM Sec. 4.1 for patches of 16 px.

    The authors' code masks ceil(N r) of N units. Ours uses MAE's rule, N - int(N (1 - r)). If N r is an integer,
    rounding errors may mask one unit more: at r = 0.8, 9 of 10 instead of 8.

    Attributes:
        mask_ratio: share of patches that are masked.
        mask_unit: side in patches of the squares that are masked as a whole; the paper's 32 px are 2 patches.
    """

    name: Literal["simmim"]
    mask_ratio: float = Field(default=0.6, gt=0, lt=1)
    mask_unit: int = Field(default=2, gt=0)

    def check(self, *, grid_size: tuple[int, int], patch_size: int, in_chans: int, num_classes: int) -> None:
        """Raises ValueError, which names the key, for options that do not fit the model."""
        units = count_units(grid_size, self.mask_unit)
        if not 0 < num_masked_patches(units, self.mask_ratio) < units:
            raise ValueError(f"mask_ratio={self.mask_ratio} masks none or all of {units} mask units")

    def build(
        self,
        encoder: ViTEncoder,
        *,
        mean: Sequence[float],
        std: Sequence[float],
        num_classes: int = 0,
        bands: Bands | None = None,
    ) -> SimMIM:
        """Builds the objective around an encoder."""
        return SimMIM(encoder, self, mean=mean, std=std, bands=bands)


class SimMIM(Objective):
    """Mask tokens replace masked patches; a linear head predicts pixels with an L1 loss (SimMIM Sec. 3)."""

    def __init__(
        self,
        encoder: ViTEncoder,
        config: SimMIMConfig,
        *,
        mean: Sequence[float],
        std: Sequence[float],
        bands: Bands | None = None,
    ) -> None:
        """Adds the mask token and the linear head to `encoder`."""
        super().__init__(encoder, mean=mean, std=std, bands=bands)
        self.config = config
        self.mask_token = nn.Parameter(torch.zeros(1, 1, encoder.embed_dim))
        nn.init.normal_(self.mask_token, std=0.02)
        self.head = nn.Linear(encoder.embed_dim, encoder.patch_size**2 * encoder.in_chans)
        self.head.apply(init_transformer)

    def draw_mask(self, batch: Batch) -> Tensor:
        """Draws masks (B, N) by the batch's keys, 1 = masked; a fixed count of whole units per image."""
        grid, unit = self.encoder.grid_size, self.config.mask_unit
        of_units = random_masking(patch_noise(batch.keys, count_units(grid, unit)), self.config.mask_ratio)
        return spread_over_units(of_units.mask, grid, unit)

    def reconstruct(self, images: Tensor, mask: Tensor) -> Tensor:
        """Predicts all patches, float32: (B, C, H, W) normalized, (B, N) -> (B, N, P*P*C)."""
        tokens = self.encoder.embed_patches(images)  # (B, N, D)
        tokens = torch.where(mask[..., None] > 0, self.mask_token.to(tokens.dtype), tokens)
        return self.head(
            self.encoder.forward_replaced(tokens)[:, self.encoder.num_prefix_tokens :]
        ).float()  # (B, N, P*P*C)

    @property
    def hidden_ratio(self) -> float:
        """The share of patches that are masked in training."""
        return self.config.mask_ratio

    def forward(self, batch: Batch) -> ObjectiveOutput:
        """Computes the mean absolute error over masked patches."""
        mask = self.draw_mask(batch)  # (B, N)
        images, valid = self.normalize(batch.images), self.valid_patches(batch.images)
        return ObjectiveOutput(self._absolute_error(images, mask, valid) / mask.sum())

    def _absolute_error(self, images: Tensor, mask: Tensor, valid: Tensor | None) -> Tensor:
        error = (self.reconstruct(images, mask) - patchify(images, self.encoder.patch_size)).abs()
        return (weigh(error, valid, mask).mean(dim=-1) * mask).sum()

    def evaluation_sums(self, batch: Batch) -> dict[str, Tensor]:
        """Sums the loss and squared errors on masked patches, for the model and for a local average."""
        mask, images = self.draw_mask(batch), self.normalize(batch.images)
        valid = self.valid_patches(batch.images)
        baseline = local_average(images, mask, self.encoder, valid)
        sums = error_sums(self, images, (self.reconstruct(images, mask), baseline), mask, valid)
        return {"loss": self._absolute_error(images, mask, valid), **sums}

    def evaluation_metrics(self, sums: dict[str, float]) -> dict[str, float]:
        """Returns the loss, PSNR on masked patches in dB, and its gain over the local average."""
        return {"loss": sums["loss"] / sums["masked"], **psnr_metrics(sums)}

    def pictures(self, batch: Batch) -> list[Picture]:
        """Shows masked, predicted, pasted, original."""
        mask, images = self.draw_mask(batch), self.normalize(batch.images)
        return reconstruction_pictures(self, batch.images, self.reconstruct(images, mask), mask)
