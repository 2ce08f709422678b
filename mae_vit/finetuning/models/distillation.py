"""Distillation through a token (DeiT, arXiv 2012.12877, Sec. 4)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mae_vit.core.batch import Batch
from mae_vit.finetuning.config.schema import DistillationKind, HeadInit
from mae_vit.finetuning.models.classifiers import ViTClassifier, make_head
from mae_vit.models.encoders.base import pool_tokens
from mae_vit.models.encoders.vit import ViTEncoder
from mae_vit.objectives.objective import ObjectiveOutput


@dataclass(frozen=True)
class Distillation:
    """The distillation loss and its options.

    Attributes:
        teacher: maps raw images (B, C, H, W) in 0..255 to logits (B, K). It gets the student's images,
            mixed ones included.
        kind: "hard" learns the teacher's most probable class, "soft" its distribution.
        weight: weight of the teacher's part in the loss, 0 to 1 (DeiT: 1/2 for hard, lambda = 0.1 for soft).
        temperature: tau of "soft".
    """

    teacher: Callable[[Tensor], Tensor]
    kind: DistillationKind
    weight: float
    temperature: float = 1.0

    def loss(self, logits: Tensor, taught: Tensor) -> Tensor:
        """Computes the teacher's part of the loss, without its weight (DeiT Eq. 2 and 3).

        It is a mean over images. DeiT's code also divides the soft part by the number of classes.

        Args:
            logits: logits of the distillation head, (B, K).
            taught: logits of the teacher, (B, K).
        """
        if self.kind == "hard":
            return F.cross_entropy(logits, taught.argmax(dim=-1))
        tau = self.temperature
        student, teacher = (x.div(tau).log_softmax(dim=-1) for x in (logits, taught))
        return tau**2 * F.kl_div(student, teacher, reduction="batchmean", log_target=True)


class DistilledViTClassifier(ViTClassifier):
    """A Vision Transformer with a second token, whose head learns from a teacher.

    The head of [CLS] learns from the labels. A prediction is the mean of both heads' distributions
    (DeiT Sec. 4, "Classification with our approach"; its code averages logits). The token has no position
    embedding: token plus position would act as one parameter.
    """

    encoder: ViTEncoder

    def __init__(
        self, encoder: ViTEncoder, *, head_init: HeadInit, distillation: Distillation, **common: Any
    ) -> None:
        """Adds token and heads to `encoder`; `common`: see `Classifier`. The teacher is not a submodule."""
        super().__init__(encoder, pool="cls", head_init=head_init, **common)
        self.distillation = distillation
        self.dist_token = nn.Parameter(torch.zeros(1, 1, encoder.embed_dim))
        nn.init.normal_(self.dist_token, std=0.02)
        self.head_dist = make_head(encoder.embed_dim, self.labels.num_classes, head_init)

    def layer_of(self, name: str) -> int | None:
        """Returns the number of a parameter's layer; the distillation token's is that of [CLS]."""
        return 0 if name == "dist_token" else super().layer_of(name)

    def both(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Returns both heads' float32 logits (B, K) of normalized images."""
        count = self.encoder.num_prefix_tokens
        patches = self.encoder.embed_patches(images) + self.encoder.pos_embed[:, count:]
        tokens = self.encoder.encode(
            torch.cat([self.dist_token.expand(len(patches), -1, -1), patches], dim=1)
        )
        return self.head(pool_tokens(self.encoder, tokens, "cls")).float(), self.head_dist(
            tokens[:, count]
        ).float()

    def logits(self, images: Tensor) -> Tensor:
        """Classifies normalized images by both heads: (B, K), the logarithm of the mean distribution."""
        first, second = (logits.log_softmax(dim=-1) for logits in self.both(images))
        return torch.logaddexp(first, second) - torch.tensor(2.0).log()

    def forward(self, batch: Batch) -> ObjectiveOutput:
        """Computes the weighted sum of both heads' losses."""
        images, targets = self.labels.targets(self.mark_missing(batch))
        logits, taught_logits = self.both(self.normalize(images))
        labeled = self.labels.cross_entropy(logits, targets)
        taught = self.distillation.loss(taught_logits, self.distillation.teacher(images))
        weight = self.distillation.weight
        output = self.labels.output((1 - weight) * labeled + weight * taught, logits, targets)
        count = torch.ones((), device=labeled.device)
        parts = {"label_loss": (labeled.detach(), count), "teacher_loss": (taught.detach(), count)}
        return ObjectiveOutput(output.loss, {**output.values, **parts})
