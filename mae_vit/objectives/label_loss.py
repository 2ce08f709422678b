"""The loss of training with labels: mixup or cutmix, and cross-entropy."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mae_vit.core.batch import Batch
from mae_vit.core.image_rows import Picture
from mae_vit.objectives.mixup import Mixing
from mae_vit.objectives.objective import ObjectiveOutput


class LabelLoss(nn.Module):
    """The training loss of a classifier. Held-out metrics do not use it.

    Shapes: B batch, C channels, H W pixels, K classes.
    """

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

    def cross_entropy(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Computes the mean cross-entropy of logits (B, K); `targets` as `self.targets` returns them."""
        return F.cross_entropy(logits, targets, label_smoothing=self.label_smoothing)

    def pictures(self, batch: Batch, original: Tensor, logits: Tensor) -> list[Picture]:
        """Shows the images that logits (B, K) classify wrongly, and all images (B, C, H, W) in 0..1.

        Images without a label are never wrong.
        """
        wrong = (logits.argmax(dim=-1) != batch.labels) & (batch.labels >= 0)  # (B,)
        return [
            Picture("classified wrongly", torch.where(wrong[:, None, None, None], original, 0.5)),
            Picture("original", original),
        ]

    def output(self, loss: Tensor, logits: Tensor, targets: Tensor) -> ObjectiveOutput:
        """Adds the training accuracy; a mixed image has the label of its larger part."""
        with torch.no_grad():
            labels = targets if targets.ndim == 1 else targets.argmax(dim=-1)  # (B,)
            hits = (logits.argmax(dim=-1) == labels).sum()
        return ObjectiveOutput(loss, {"accuracy": (hits, torch.full_like(hits, len(logits)))})
