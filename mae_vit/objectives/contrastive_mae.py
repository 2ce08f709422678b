"""MAE with a contrast between two masked views of each image: CAN (arXiv 2210.16870) without its noise branch.

Shapes: B rows of a micro-batch, views 2j and 2j + 1 of image j; G images a group; D width; d projected width;
N_keep visible patches.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import Unpack

from mae_vit.core.batch import Batch
from mae_vit.models.attention import without_autocast
from mae_vit.models.encoders.base import Encoder, init_transformer
from mae_vit.objectives.config import ContrastiveMAEConfig
from mae_vit.objectives.mae import MAE
from mae_vit.objectives.objective import ObjectiveOutput, Pixels

# Logged values of a contrast, in training and on held-out images.
METRICS = ("contrast_loss", "retrieval_top1", "positive_cosine", "negative_cosine", "z_std")
_VIEWS = "views"


def contrast(z: Tensor, group_size: int, temperature: float) -> dict[str, Tensor]:
    """Computes InfoNCE within groups (arXiv 1807.03748; NT-Xent of arXiv 2002.05709, Sec. 2.1).

    Args:
        z: float32 (B, d), rows of length 1. Rows 2j and 2j + 1 are partners. B is a multiple of 2G.
        group_size: G, half of a group's rows.
        temperature: divides the cosines.

    Returns:
        For each view, (B,): `contrast_loss`, InfoNCE; `retrieval_top1`, whether the partner is the nearest view of
        its group; `positive_cosine` with the partner; `negative_cosine`, mean over the other views of the group.
        All but the loss are detached.
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
    values = (losses, retrieved.float(), positive.detach(), others / (rows - 2))
    return dict(zip(METRICS, values, strict=False))


class ContrastiveMAE(MAE):
    """MAE with a head that distinguishes images by the mean of their visible tokens.

    It needs no teacher, no queue and no second forward pass: both views are rows of MAE's batch.
    """

    def __init__(self, encoder: Encoder, config: ContrastiveMAEConfig, **pixels: Unpack[Pixels]) -> None:
        """Adds MAE's decoder and the projection head to `encoder`."""
        super().__init__(encoder, config, **pixels)
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
        """Maps encoded views (B, k + N_keep, D) to float32 (B, d) of length 1; class tokens are not used."""
        patches = encoded[:, self.encoder.num_prefix_tokens :]
        return F.normalize(self.projection(patches.mean(dim=1)).float(), dim=1)

    def forward(self, batch: Batch) -> ObjectiveOutput:
        """Computes the reconstruction loss and the contrast of whole groups."""
        reconstruction, encoded = self.encode_and_reconstruct(batch)
        z = self.project(encoded)  # (B, d)
        with without_autocast(z):
            contrasts = contrast(z, self.group_size, self.temperature)
        loss = reconstruction + self.contrast_weight * contrasts["contrast_loss"].mean()
        sums = contrast_sums(contrasts, z, self.group_size)
        views = sums.pop(_VIEWS)
        values = {"reconstruction_loss": (reconstruction.detach() * views, views)}
        return ObjectiveOutput(loss, values | {name: (value, views) for name, value in sums.items()})

    def evaluation_sums(self, batch: Batch) -> dict[str, Tensor]:
        """Adds the contrast of two masks of each plain image to MAE's sums; only whole groups count."""
        sums = super().evaluation_sums(batch)
        whole = len(batch.images) // self.group_size * self.group_size
        if not whole:
            return sums | dict.fromkeys((*METRICS, _VIEWS), torch.zeros_like(sums["loss"]))
        images = self.normalize(batch.images[:whole])
        keys = replace(batch.keys, index=batch.keys.index[:whole])
        masks = [self.draw_masking(keys), self.draw_masking(replace(keys, epoch=keys.epoch + 1))]
        views = [self.project(self.encoder.forward_visible(images, mask.ids_keep)) for mask in masks]
        z = torch.stack(views, dim=1).flatten(0, 1)  # (2 * whole, d), partners side by side
        with without_autocast(z):
            contrasts = contrast(z, self.group_size, self.temperature)
        return sums | contrast_sums(contrasts, z, self.group_size)

    def evaluation_metrics(self, sums: dict[str, float]) -> dict[str, float]:
        """Adds the contrast's metrics to MAE's, if there was a whole group (chance of retrieval: 1 / (2G - 1))."""
        metrics = super().evaluation_metrics(sums)
        if not sums[_VIEWS]:
            return metrics
        return metrics | {name: sums[name] / sums[_VIEWS] for name in METRICS}


def contrast_sums(contrasts: dict[str, Tensor], z: Tensor, group_size: int) -> dict[str, Tensor]:
    """Sums `METRICS` over the views of whole groups, and counts the views.

    `z_std` is sqrt(d) times the standard deviation of z (B, d) within a group, averaged over dimensions. It is near
    1 if views spread evenly over the sphere, and 0 after a collapse.
    """
    z = z.detach()
    views = z.new_full((), len(z))
    spread = z.view(-1, 2 * group_size, z.shape[-1]).std(dim=1).mean() * z.shape[-1] ** 0.5
    totals = {name: values.detach().sum() for name, values in contrasts.items()}
    return {**totals, "z_std": spread * views, _VIEWS: views}
