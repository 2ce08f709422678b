"""MAE with a contrast between two masked views of each image: CAN (arXiv 2210.16870) without its noise branch.

Shapes: B rows of a micro-batch, views 2j and 2j + 1 of image j; G images a group; D width; d projected width;
N_keep visible patches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from mae_vit.core.bands import Bands
from mae_vit.core.batch import Batch
from mae_vit.models.attention import without_autocast
from mae_vit.models.masking import patch_noise, random_masking
from mae_vit.models.vit import ViTEncoder, init_transformer
from mae_vit.objectives.mae import MAE, MAEConfig
from mae_vit.objectives.objective import Grouping, ObjectiveOutput


class ContrastiveMAEConfig(MAEConfig):
    """Options of the `contrastive_mae` objective: those of `mae` and of the contrastive loss.

    The loss is L_rec + contrast_weight * L_con. It needs two views of each image (`data.repeats=2`).
    `group_size` consecutive images of the global order form a group, and only views of one group are
    contrasted. So the loss does not depend on how a batch is split.
    """

    name: Literal["contrastive_mae"]  # type: ignore[assignment]
    # CAN Sec. 4 masks half: the contrast must recognize an image from its visible patches.
    mask_ratio: float = Field(default=0.5, gt=0, lt=1)
    decoder_embed_dim: int = Field(default=96, gt=0)
    decoder_depth: int = Field(default=2, gt=0)
    decoder_num_heads: int = Field(default=4, gt=0)
    decode_ratio: float = Field(default=0.5, gt=0, le=1)
    contrast_weight: float = Field(default=0.1, ge=0)
    temperature: float = Field(default=0.2, gt=0)
    group_size: int = Field(default=64, gt=1)
    projection_dim: int = Field(default=128, gt=0)

    @property
    def grouping(self) -> Grouping:
        """Groups two views of each of `group_size` images."""
        why = (
            f"objective.group_size={self.group_size} contrasts two views of each of {self.group_size} images"
        )
        return Grouping(unit=2 * self.group_size, views=2, why=why)

    def build(
        self,
        encoder: ViTEncoder,
        *,
        mean: Sequence[float],
        std: Sequence[float],
        num_classes: int = 0,
        bands: Bands | None = None,
    ) -> ContrastiveMAE:
        """Builds the objective around an encoder."""
        return ContrastiveMAE(encoder, self, mean=mean, std=std, bands=bands)


class Contrast(NamedTuple):
    """How well each view identifies the other view of its image.

    Attributes:
        losses: float32 (B,), InfoNCE of each view.
        retrieved: bool (B,), whether the partner is the nearest view of its group.
        positive: float32 (B,), cosine with the partner.
        negative: float32 (B,), mean cosine with the other views of the group.
    """

    losses: Tensor
    retrieved: Tensor
    positive: Tensor
    negative: Tensor


def contrast(z: Tensor, group_size: int, temperature: float) -> Contrast:
    """Computes InfoNCE within groups (arXiv 1807.03748; NT-Xent of arXiv 2002.05709, Sec. 2.1).

    Args:
        z: float32 (B, d), rows of length 1. Rows 2j and 2j + 1 are partners. B is a multiple of 2G.
        group_size: G, half of a group's rows.
        temperature: divides the cosines.
    """
    rows = 2 * group_size
    grouped = z.view(-1, rows, z.shape[-1])  # (B / 2G, 2G, d)
    cosines = grouped @ grouped.transpose(1, 2)  # (B / 2G, 2G, 2G)
    diagonal = torch.eye(rows, dtype=torch.bool, device=z.device)
    partner = (torch.arange(rows, device=z.device) ^ 1).expand(len(grouped), -1)  # (B / 2G, 2G)
    scores = (cosines / temperature).masked_fill(diagonal, -torch.inf)  # (B / 2G, 2G, 2G)
    losses = F.cross_entropy(scores.flatten(0, 1), partner.flatten(), reduction="none")  # (B,)
    with torch.no_grad():
        positive = cosines.gather(2, partner[..., None]).flatten()  # (B,)
        others = cosines.sum(dim=2).flatten() - positive - cosines.diagonal(dim1=1, dim2=2).flatten()
        retrieved = (scores.argmax(dim=2) == partner).flatten()  # (B,)
    return Contrast(losses, retrieved, positive.detach(), others / (rows - 2))


class ContrastiveMAE(MAE):
    """MAE with a head that distinguishes images by the mean of their visible tokens.

    It needs no teacher, no queue and no second forward pass: both views are rows of MAE's batch.
    """

    def __init__(
        self,
        encoder: ViTEncoder,
        config: ContrastiveMAEConfig,
        *,
        mean: Sequence[float],
        std: Sequence[float],
        bands: Bands | None = None,
    ) -> None:
        """Adds MAE's decoder and the projection head to `encoder`."""
        super().__init__(encoder, config, mean=mean, std=std, bands=bands)
        self.contrast_weight, self.temperature = config.contrast_weight, config.temperature
        self.group_size = config.group_size
        hidden = 4 * encoder.embed_dim
        self.projection = nn.Sequential(
            nn.Linear(encoder.embed_dim, hidden),
            nn.LayerNorm(hidden),
            nn.GELU(),
            nn.Linear(hidden, config.projection_dim),
        )
        self.projection.apply(init_transformer)

    def project(self, encoded: Tensor) -> Tensor:
        """Maps encoded views (B, 1 + N_keep, D) to float32 (B, d) of length 1; [CLS] is not used."""
        return F.normalize(self.projection(encoded[:, 1:].mean(dim=1)).float(), dim=1)

    def forward(self, batch: Batch) -> ObjectiveOutput:
        """Computes the reconstruction loss and the contrast of whole groups."""
        reconstruction, encoded = self.encode_and_reconstruct(batch)
        z = self.project(encoded)  # (B, d)
        with without_autocast(z):
            contrasts = contrast(z, self.group_size, self.temperature)
        loss = reconstruction + self.contrast_weight * contrasts.losses.mean()
        return ObjectiveOutput(loss, _values(reconstruction, contrasts, z, self.group_size))

    def evaluation_sums(self, batch: Batch) -> dict[str, Tensor]:
        """Adds to MAE's sums how often two masked views of an image retrieve each other within whole groups."""
        sums = super().evaluation_sums(batch)
        whole = len(batch.images) // self.group_size * self.group_size
        if not whole:
            nothing = torch.zeros_like(sums["loss"])
            return {**sums, "retrieved": nothing, "contrast": nothing, "views": nothing}
        images = self.normalize(batch.images[:whole])
        keys = replace(batch.keys, index=batch.keys.index[:whole])
        masks = [
            random_masking(patch_noise(one, self.encoder.num_patches), self.mask_ratio)
            for one in (keys, replace(keys, epoch=keys.epoch + 1))
        ]
        views = [self.project(self.encoder.forward_visible(images, mask.ids_keep)) for mask in masks]
        z = torch.stack(views, dim=1).flatten(0, 1)  # (2 * whole, d), partners side by side
        with without_autocast(z):
            contrasts = contrast(z, self.group_size, self.temperature)
        return {
            **sums,
            "retrieved": contrasts.retrieved.sum(),
            "contrast": contrasts.losses.sum(),
            "views": torch.full_like(contrasts.losses.sum(), len(z)),
        }

    def evaluation_metrics(self, sums: dict[str, float]) -> dict[str, float]:
        """Adds retrieval (chance: 1 / (2G - 1)) and the contrast to MAE's metrics, if there was a whole group."""
        metrics = super().evaluation_metrics(sums)
        if not sums["views"]:
            return metrics
        return {
            **metrics,
            "retrieval_top1": sums["retrieved"] / sums["views"],
            "contrast": sums["contrast"] / sums["views"],
        }


def _values(
    reconstruction: Tensor, contrasts: Contrast, z: Tensor, group_size: int
) -> dict[str, tuple[Tensor, Tensor]]:
    """Returns the values to log: both losses, retrieval, cosines, and the spread of z, which is 0 after a collapse."""
    rows = torch.full_like(reconstruction.detach(), len(z))
    # It is near 1 if the views of a group spread evenly over the sphere.
    spread = z.detach().view(-1, 2 * group_size, z.shape[-1]).std(dim=1).mean() * z.shape[-1] ** 0.5
    return {
        "reconstruction_loss": (reconstruction.detach() * rows, rows),
        "contrast_loss": (contrasts.losses.detach().sum(), rows),
        "retrieval_top1": (contrasts.retrieved.sum().float(), rows),
        "positive_cosine": (contrasts.positive.sum(), rows),
        "negative_cosine": (contrasts.negative.sum(), rows),
        "z_std": (spread * rows, rows),
    }
