"""The contrast between two views of each image, of `contrastive` and `contrastive_mae`.

Shapes: B views, 2j and 2j + 1 of image j; G images a group; D width; d projected width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mae_vit.models.attention import without_autocast
from mae_vit.models.encoders.base import init_transformer
from mae_vit.objectives.config import ContrastSection

# Logged values of a contrast, in training and on held-out images.
METRICS = ("contrast_loss", "retrieval_top1", "positive_cosine", "negative_cosine", "z_std")
VIEWS = "views"


class Contrast(nn.Sequential):
    """A projection head, and the contrast of what it gives within groups of images."""

    def __init__(self, width: int, config: ContrastSection) -> None:
        super().__init__(
            nn.Linear(width, 4 * width),
            nn.LayerNorm(4 * width),
            nn.GELU(),
            nn.Linear(4 * width, config.projection_dim),
        )
        self.apply(init_transformer)
        self.group_size, self.temperature = config.group_size, config.temperature

    def forward(self, features: Tensor) -> Tensor:
        """Maps features (B, D) to float32 (B, d) of length 1."""
        return F.normalize(super().forward(features).float(), dim=1)

    def compare(self, z: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the mean loss of whole groups (B, d), and their `contrast_sums`."""
        with without_autocast(z):
            contrasts = contrast(z, self.group_size, self.temperature)
        return contrasts["contrast_loss"].mean(), contrast_sums(contrasts, z, self.group_size)

    def whole(self, images: int) -> int:
        """Returns how many of so many images are in whole groups."""
        return images // self.group_size * self.group_size


def contrast(z: Tensor, group_size: int, temperature: float) -> dict[str, Tensor]:
    """Computes InfoNCE within groups (arXiv 1807.03748; NT-Xent of arXiv 2002.05709, Sec. 2.1).

    Rows of `z`, float32 (B, d), have length 1; rows 2j and 2j + 1 are partners. B is a multiple of 2 `group_size`.

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


def contrast_sums(contrasts: dict[str, Tensor], z: Tensor, group_size: int) -> dict[str, Tensor]:
    """Sums `METRICS` over the views of whole groups, and counts the views.

    `z_std` is sqrt(d) times the standard deviation of z (B, d) within a group, averaged over dimensions. It is near
    1 if views spread evenly over the sphere, and 0 after a collapse.
    """
    z = z.detach()
    views = z.new_full((), len(z))
    spread = z.view(-1, 2 * group_size, z.shape[-1]).std(dim=1).mean() * z.shape[-1] ** 0.5
    totals = {name: values.detach().sum() for name, values in contrasts.items()}
    return {**totals, "z_std": spread * views, VIEWS: views}


def no_sums(like: Tensor) -> dict[str, Tensor]:
    """Returns the sums of no group."""
    return dict.fromkeys((*METRICS, VIEWS), like.new_zeros(()))


def logged(sums: dict[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """Returns the sums of a training step as values of `ObjectiveOutput`."""
    return {name: (value.detach(), sums[VIEWS]) for name, value in sums.items() if name != VIEWS}


def contrast_metrics(sums: dict[str, float]) -> dict[str, float]:
    """Returns the means over views, if there was a whole group (chance of retrieval: 1 / (2G - 1))."""
    return {name: sums[name] / sums[VIEWS] for name in METRICS} if sums[VIEWS] else {}
