"""Classification with labels: the supervised control (ViT Sec. 3.1, 4.1)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import Unpack

from mae_vit.core.batch import Batch
from mae_vit.models.encoders.base import Encoder, init_transformer, pool_tokens
from mae_vit.objectives.config import SupervisedConfig
from mae_vit.objectives.label_loss import LabelLoss, LabelTask
from mae_vit.objectives.objective import Objective, Pixels


class Supervised(LabelTask, Objective):
    """Cross-entropy of a head on [CLS], or on the mean of the patch tokens.

    The "mlp" head has one hidden layer of the encoder's width with tanh, as in the ViT
    paper's pretraining. The "linear" head has none.
    """

    def __init__(
        self, encoder: Encoder, config: SupervisedConfig, *, num_classes: int, **pixels: Unpack[Pixels]
    ) -> None:
        super().__init__(encoder, **pixels)
        self.pool = config.pool
        self.labels = LabelLoss(
            num_classes, label_smoothing=config.label_smoothing, mixup=config.mixup, cutmix=config.cutmix
        )
        width = encoder.embed_dim
        hidden = [nn.Linear(width, width), nn.Tanh()] if config.head == "mlp" else []
        self.head = nn.Sequential(*hidden, nn.Linear(width, num_classes))
        self.head.apply(init_transformer)

    def logits(self, images: Tensor) -> Tensor:
        """Classifies normalized images: (B, C, H, W) -> (B, K)."""
        return self.head(pool_tokens(self.encoder, self.encoder.forward_features(images), self.pool))

    def evaluation_sums(self, batch: Batch) -> dict[str, Tensor]:
        """Sums hits and loss over images with a label. Held-out labels use the numbers of the training classes."""
        logits = self.classify(batch)
        return {
            "images": (batch.labels >= 0).sum().float(),
            "loss": F.cross_entropy(logits, batch.labels, reduction="sum", ignore_index=-1),
            "hits": (logits.argmax(dim=-1) == batch.labels).sum().float(),
        }

    def evaluation_metrics(self, sums: dict[str, float]) -> dict[str, float]:
        """Returns the accuracy and the loss without label smoothing; nothing if no image has a label."""
        if not sums["images"]:
            return {}
        return {"loss": sums["loss"] / sums["images"], "accuracy": sums["hits"] / sums["images"]}
