"""Fine-tuning: a Vision Transformer with a head, or a whole convolutional network, on labels."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mae_vit.batch import Batch
from mae_vit.encoder import ViTEncoder
from mae_vit.objectives.base import ObjectiveOutput, Picture, Task

Pool = Literal["cls", "mean"]
HeadInit = Literal["zero", "small"]

# The official MAE code's fine-tuning head.
_SMALL_STD = 2e-5


class Classifier(Task):
    """Cross-entropy of a network's logits.

    Shapes: B batch, C channels, H W pixels, K classes.
    """

    def __init__(self, *, mean: Sequence[float], std: Sequence[float], label_smoothing: float) -> None:
        """Holds the normalization; `label_smoothing` is for training alone."""
        super().__init__(mean=mean, std=std)
        self.label_smoothing = label_smoothing

    @abstractmethod
    def logits(self, images: Tensor) -> Tensor:
        """Classifies normalized images: (B, C, H, W) -> (B, K)."""

    def classify(self, batch: Batch) -> Tensor:
        """Returns float32 logits (B, K) of raw images."""
        return self.logits(self.normalize(batch.images)).float()

    def forward(self, batch: Batch) -> ObjectiveOutput:
        """Computes the mean cross-entropy, and the accuracy on the images as trained on."""
        logits = self.classify(batch)
        loss = F.cross_entropy(logits, batch.labels, label_smoothing=self.label_smoothing)
        with torch.no_grad():
            hits = (logits.argmax(dim=-1) == batch.labels).sum()
        return ObjectiveOutput(loss, {"accuracy": (hits, torch.full_like(hits, len(logits)))})

    def evaluation_sums(self, batch: Batch) -> dict[str, Tensor]:
        """Loss and hits."""
        logits = self.classify(batch)
        first = logits.topk(min(5, logits.shape[1]), dim=-1).indices == batch.labels[:, None]
        return {
            "images": torch.tensor(float(len(logits)), device=logits.device),
            "loss": F.cross_entropy(logits, batch.labels, reduction="sum"),
            "top1": (logits.argmax(dim=-1) == batch.labels).sum().float(),
            "top5": first.any(dim=1).sum().float(),
        }

    def evaluation_metrics(self, sums: dict[str, float]) -> dict[str, float]:
        """Loss without smoothing, and accuracies."""
        return {name: sums[name] / sums["images"] for name in ("loss", "top1", "top5")}

    def pictures(self, batch: Batch) -> list[Picture]:
        """Shows which images are classified wrongly, and all."""
        wrong = (self.classify(batch).argmax(dim=-1) != batch.labels)[:, None, None, None]
        original = batch.images.float() / 255
        return [
            Picture("classified wrongly", torch.where(wrong, original, 0.5)),
            Picture("original", original),
        ]


class ViTClassifier(Classifier):
    """An encoder, a read-out and one linear layer (ViT Sec. 3.1; MAE Sec. A.1).

    `pool="cls"` reads [CLS] behind the encoder's final norm (ViT). `pool="mean"` averages
    the patch tokens in front of it; the final norm is then dropped and a new one,
    `fc_norm`, stands behind the mean (official MAE code, `global_pool`). Names are timm's.
    """

    def __init__(
        self,
        encoder: ViTEncoder,
        *,
        pool: Pool,
        head_init: HeadInit,
        num_classes: int,
        mean: Sequence[float],
        std: Sequence[float],
        label_smoothing: float = 0.0,
    ) -> None:
        """Adds read-out and head to `encoder`, which loses its final norm under "mean"."""
        super().__init__(mean=mean, std=std, label_smoothing=label_smoothing)
        self.encoder = encoder
        self.pool = pool
        if pool == "mean":
            encoder.norm = nn.Identity()
        # LayerNorm eps as timm's and MAE's.
        self.fc_norm = nn.LayerNorm(encoder.embed_dim, eps=1e-6) if pool == "mean" else nn.Identity()
        self.head = nn.Linear(encoder.embed_dim, num_classes)
        # Zero: ViT Sec. 3.2.
        if head_init == "zero":
            nn.init.zeros_(self.head.weight)
        else:
            nn.init.trunc_normal_(self.head.weight, std=_SMALL_STD)
        nn.init.zeros_(self.head.bias)

    def logits(self, images: Tensor) -> Tensor:
        """Classifies normalized images: (B, C, H, W) -> (B, K)."""
        tokens = self.encoder.forward_features(images)
        pooled = tokens[:, 0] if self.pool == "cls" else tokens[:, 1:].mean(dim=1)
        return self.head(self.fc_norm(pooled))


class NetworkClassifier(Classifier):
    """A network that ends in its own head."""

    def __init__(
        self,
        network: nn.Module,
        *,
        mean: Sequence[float],
        std: Sequence[float],
        label_smoothing: float = 0.0,
    ) -> None:
        """Holds the network, (B, C, H, W) -> (B, K)."""
        super().__init__(mean=mean, std=std, label_smoothing=label_smoothing)
        self.network = network

    def logits(self, images: Tensor) -> Tensor:
        """Classifies normalized images: (B, C, H, W) -> (B, K)."""
        return self.network(images)
