"""The loss of training with labels: mixup or cutmix over neighbors in the global order, and cross-entropy.

Images 2j and 2j + 1 of an epoch's order are a pair, on any number of ranks; its draws depend on the key of its first
sample. The recipe is timm's, but timm pairs images within a micro-batch and draws from a global generator, so its
result depends on the split over ranks.
Shapes: B images, P = B / 2 pairs, C channels, H W pixels, K classes.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace

import torch
import torch.nn.functional as F
from scipy.special import betaincinv
from torch import Tensor, nn

from mae_vit.core.batch import Batch
from mae_vit.core.image_rows import Picture
from mae_vit.core.keyed_rng import RngStream
from mae_vit.objectives.objective import ObjectiveOutput, Task

# Number of tabulated quantiles of each Beta distribution: one for each 16-bit number.
_QUANTILES = 1 << 16


class Mixing(nn.Module):
    """Blends the two images of a pair, or pastes a box of each into the other, and mixes their labels.

    Mixup (arXiv 1710.09412) averages both images with weights lambda and 1 - lambda, with lambda from
    Beta(alpha, alpha). Cutmix (arXiv 1905.04899) pastes a box of (1 - lambda) of the area, clipped at
    the edges; labels follow the area. With both options, each pair draws one of the two with equal
    chances (timm's defaults, as in MAE's fine-tuning, Sec. A.1, where a whole batch draws once).

    Draws are table look-ups or integer arithmetic, so all devices agree. Logarithms and roots differ
    between devices, so the CPU computes them once, for the tables.
    """

    blends: Tensor
    cuts: Tensor

    def __init__(self, *, mixup: float, cutmix: float) -> None:
        """Builds the tables; an alpha of 0 turns mixup or cutmix off."""
        super().__init__()
        self.mixup, self.cutmix = mixup, cutmix
        # Not persistent: the tables are constants, not part of a model's state.
        self.register_buffer("blends", _quantiles(mixup), persistent=False)
        # Ratio of the box's side to the image's side.
        self.register_buffer("cuts", (1 - _quantiles(cutmix)).sqrt(), persistent=False)

    def forward(self, batch: Batch, num_classes: int) -> tuple[Tensor, Tensor]:
        """Mixes a micro-batch of whole pairs; every image must have a label.

        Returns images, float32 (B, C, H, W) in 0..255, and labels, float32 (B, K) of sum 1. Raises ValueError if a pair
        lacks its second image.
        """
        size = len(batch.images)
        if size % 2:
            raise ValueError(f"mixup and cutmix pair images, and a micro-batch of {size} leaves one over")
        kept, share = self._draw(batch)  # (P, H, W), (P,)
        images = batch.images.float().unflatten(0, (-1, 2))  # (P, 2, C, H, W)
        labels = F.one_hot(batch.labels, num_classes).float().unflatten(0, (-1, 2))  # (P, 2, K)
        kept, share = kept[:, None, None], share[:, None, None]  # (P, 1, 1, H, W), (P, 1, 1)
        own, other = images * kept, images.flip(1) * (1 - kept)
        if batch.images.is_floating_point():
            # A missing value is NaN, also times 0: it counts only where its image does. Blended, it stays missing.
            own, other = own.masked_fill(kept == 0, 0), other.masked_fill(kept == 1, 0)
        return (
            (own + other).flatten(0, 1),
            (labels * share + labels.flip(1) * (1 - share)).flatten(0, 1),
        )

    def _draw(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Returns the weight of an image in its own mixture, for P pairs: per pixel (P, H, W), and overall (P,)."""
        height, width = batch.images.shape[-2:]
        keys = batch.keys
        drawn = replace(keys, index=keys.index[::2]).random_uint32(RngStream.MIX, 4)  # (P, 4)
        quantile = drawn[:, 1] >> 16
        blend = self.blends[quantile]  # (P,)
        if not self.cutmix:
            return blend[:, None, None].expand(-1, height, width), blend
        inside, area = self._boxes(self.cuts[quantile], drawn[:, 2:], height, width)
        left = 1 - area.float() / (height * width)
        if not self.mixup:
            return (~inside).float(), left
        blending = (drawn[:, 0] & 1).bool()
        return (
            torch.where(blending[:, None, None], blend[:, None, None], (~inside).float()),
            torch.where(blending, blend, left),
        )

    @staticmethod
    def _boxes(cut: Tensor, drawn: Tensor, height: int, width: int) -> tuple[Tensor, Tensor]:
        """Draws boxes with uniform centers, clipped at the edges: inside (P, H, W), and areas (P,) in pixels."""
        sides = []
        for axis, side in enumerate((height, width)):
            length = (cut * side).long()
            center = (drawn[:, axis] * side) >> 32
            places = torch.arange(side, device=drawn.device)
            sides.append(
                (places >= (center - length // 2)[:, None]) & (places < (center + (length + 1) // 2)[:, None])
            )
        rows, columns = sides
        return rows[:, :, None] & columns[:, None, :], rows.sum(dim=1) * columns.sum(dim=1)


def _quantiles(alpha: float) -> Tensor:
    """Returns quantiles of Beta(alpha, alpha), float32 (2**16,); unused ones for alpha 0."""
    if not alpha:
        return torch.ones(_QUANTILES)
    with torch.device("cpu"):
        # Cost estimates build models on the meta device, where numpy() would fail.
        chances = (torch.arange(_QUANTILES, dtype=torch.float64) + 0.5) / _QUANTILES
    return torch.from_numpy(betaincinv(alpha, alpha, chances.numpy())).float()


class LabelLoss(nn.Module):
    """The training loss of a classifier. Held-out metrics do not use it."""

    def __init__(
        self, num_classes: int, *, label_smoothing: float = 0.0, mixup: float = 0.0, cutmix: float = 0.0
    ) -> None:
        """Takes the options; alphas of 0 turn mixup and cutmix off. Label smoothing follows arXiv 1512.00567."""
        super().__init__()
        self.num_classes, self.label_smoothing = num_classes, label_smoothing
        self.mixing = Mixing(mixup=mixup, cutmix=cutmix) if mixup or cutmix else None

    def targets(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Returns raw images (B, C, H, W), mixed or not, and labels: int64 (B,), or mixed float32 (B, K)."""
        if self.mixing is None:
            return batch.images, batch.labels
        return self.mixing(batch, self.num_classes)

    def output(self, logits: Tensor, targets: Tensor) -> ObjectiveOutput:
        """Computes the mean cross-entropy of logits (B, K), and the accuracy; `targets` as `self.targets` returns them.

        For the accuracy, a mixed image has the label of its larger part.
        """
        loss = F.cross_entropy(logits, targets, label_smoothing=self.label_smoothing)
        with torch.no_grad():
            labels = targets if targets.ndim == 1 else targets.argmax(dim=-1)  # (B,)
            hits = (logits.argmax(dim=-1) == labels).sum()
        return ObjectiveOutput(loss, {"accuracy": (hits, torch.full_like(hits, len(logits)))})


class LabelTask(Task):
    """A task that is trained by the cross-entropy of its logits."""

    labels: LabelLoss

    @abstractmethod
    def logits(self, images: Tensor) -> Tensor:
        """Classifies normalized images: (B, C, H, W) -> (B, K)."""

    def classify(self, batch: Batch) -> Tensor:
        """Returns float32 logits (B, K) of raw images."""
        return self.logits(self.normalize(batch.images)).float()

    def forward(self, batch: Batch) -> ObjectiveOutput:
        """Computes the mean cross-entropy, and the accuracy on the augmented training images."""
        images, targets = self.labels.targets(self.mark_missing(batch))
        return self.labels.output(self.logits(self.normalize(images)).float(), targets)

    def pictures(self, batch: Batch) -> list[Picture]:
        """Shows the wrongly classified images, and all images. Images without a label are never wrong."""
        wrong = (self.classify(batch).argmax(dim=-1) != batch.labels) & (batch.labels >= 0)  # (B,)
        original = self.unit(batch.images)
        return [
            Picture("classified wrongly", torch.where(wrong[:, None, None, None], original, 0.5)),
            Picture("original", original),
        ]
