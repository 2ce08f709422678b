"""Fine-tuning: a Vision Transformer with a head, or a whole convolutional network, on labels."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mae_vit.core.batch import Batch
from mae_vit.core.image_rows import Picture
from mae_vit.finetuning.config.schema import HeadInit
from mae_vit.models.vit import Pool, ViTEncoder, pooled
from mae_vit.objectives.label_loss import LabelLoss
from mae_vit.objectives.objective import ObjectiveOutput, Task

# The official MAE code's fine-tuning head.
_SMALL_STD = 2e-5


class Classifier(Task):
    """Cross-entropy of a network's logits.

    Shapes: B batch, C channels, H W pixels, K classes.
    """

    def __init__(self, *, mean: Sequence[float], std: Sequence[float], labels: LabelLoss) -> None:
        """Holds the normalization and how labels are learned from."""
        super().__init__(mean=mean, std=std)
        self.labels = labels

    @abstractmethod
    def logits(self, images: Tensor) -> Tensor:
        """Classifies normalized images: (B, C, H, W) -> (B, K)."""

    def classify(self, batch: Batch) -> Tensor:
        """Returns float32 logits (B, K) of raw images."""
        return self.logits(self.normalize(batch.images)).float()

    def forward(self, batch: Batch) -> ObjectiveOutput:
        """Computes the mean cross-entropy, and the accuracy on the images as trained on."""
        images, targets = self.labels.targets(batch)
        logits = self.logits(self.normalize(images)).float()
        return self.labels.output(self.labels.cross_entropy(logits, targets), logits, targets)

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
        return self.labels.pictures(batch, self.classify(batch))


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
        mean: Sequence[float],
        std: Sequence[float],
        labels: LabelLoss,
    ) -> None:
        """Adds read-out and head to `encoder`, which loses its final norm under "mean"."""
        super().__init__(mean=mean, std=std, labels=labels)
        self.encoder = encoder
        self.pool = pool
        if pool == "mean":
            encoder.norm = nn.Identity()
        # LayerNorm eps as timm's and MAE's.
        self.fc_norm = nn.LayerNorm(encoder.embed_dim, eps=1e-6) if pool == "mean" else nn.Identity()
        self.head = make_head(encoder.embed_dim, labels.num_classes, head_init)

    def logits(self, images: Tensor) -> Tensor:
        """Classifies normalized images: (B, C, H, W) -> (B, K)."""
        tokens = self.encoder.forward_features(images)
        return self.head(self.fc_norm(pooled(tokens, self.pool)))


def make_head(embed_dim: int, num_classes: int, init: HeadInit) -> nn.Linear:
    """A linear layer of zeros (ViT Sec. 3.2), or of the official MAE code's small numbers."""
    head = nn.Linear(embed_dim, num_classes)
    if init == "zero":
        nn.init.zeros_(head.weight)
    else:
        nn.init.trunc_normal_(head.weight, std=_SMALL_STD)
    nn.init.zeros_(head.bias)
    return head


class NetworkClassifier(Classifier):
    """A network that ends in its own head."""

    def __init__(
        self,
        network: nn.Module,
        *,
        mean: Sequence[float],
        std: Sequence[float],
        labels: LabelLoss,
    ) -> None:
        """Holds the network, (B, C, H, W) -> (B, K)."""
        super().__init__(mean=mean, std=std, labels=labels)
        self.network = network

    def logits(self, images: Tensor) -> Tensor:
        """Classifies normalized images: (B, C, H, W) -> (B, K)."""
        if images.is_cuda:
            # The layout of cuDNN's tensor-core kernels; what follows a convolution takes it on from its input,
            # so that weights and checkpoints keep theirs.
            images = images.contiguous(memory_format=torch.channels_last)
        return self.network(images)
