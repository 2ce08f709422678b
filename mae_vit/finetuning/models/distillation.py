"""Distillation through a token (DeiT, arXiv 2012.12877, Sec. 4)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mae_vit.core.batch import Batch
from mae_vit.finetuning.config.schema import DistillationKind, HeadInit
from mae_vit.finetuning.models.classifiers import ViTClassifier, make_head
from mae_vit.models.vit import ViTEncoder
from mae_vit.objectives.label_loss import LabelLoss
from mae_vit.objectives.objective import ObjectiveOutput


@dataclass(frozen=True)
class Distillation:
    """How a teacher is learned from.

    Attributes:
        teacher: raw images (B, C, H, W) in 0..255, mixed where the student's are, to logits (B, K).
        kind: "hard" learns the teacher's choice, "soft" its distribution.
        weight: share of the teacher's part of the loss (DeiT: 1/2 hard, lambda = 0.1 soft).
        temperature: tau of "soft".
    """

    teacher: Callable[[Tensor], Tensor]
    kind: DistillationKind
    weight: float
    temperature: float = 1.0

    def loss(self, logits: Tensor, taught: Tensor) -> Tensor:
        """The teacher's part, not weighted (DeiT Eq. 2 and 3).

        A mean over images; DeiT's code divides the soft part by the number of classes as well.

        Args:
            logits: of the distillation head (B, K).
            taught: the teacher's (B, K).
        """
        if self.kind == "hard":
            return F.cross_entropy(logits, taught.argmax(dim=-1))
        tau = self.temperature
        student, teacher = (x.div(tau).log_softmax(dim=-1) for x in (logits, taught))
        return tau**2 * F.kl_div(student, teacher, reduction="batchmean", log_target=True)


class DistilledViTClassifier(ViTClassifier):
    """A Vision Transformer with a second token, whose head learns from a teacher.

    [CLS]'s head learns from the labels. Measured is the mean of both heads' distributions
    (DeiT Sec. 4, "Classification with our approach"; its code averages logits). The token has no position of its own:
    the sum of both would be one parameter all the same.
    """

    def __init__(
        self,
        encoder: ViTEncoder,
        *,
        head_init: HeadInit,
        mean: Sequence[float],
        std: Sequence[float],
        labels: LabelLoss,
        distillation: Distillation,
    ) -> None:
        """Adds token and heads to `encoder`; the teacher is no part of the model."""
        super().__init__(encoder, pool="cls", head_init=head_init, mean=mean, std=std, labels=labels)
        self.distillation = distillation
        self.dist_token = nn.Parameter(torch.zeros(1, 1, encoder.embed_dim))
        nn.init.normal_(self.dist_token, std=0.02)
        self.head_dist = make_head(encoder.embed_dim, labels.num_classes, head_init)

    def both(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Returns both heads' float32 logits (B, K) of normalized images."""
        patches = self.encoder.embed_patches(images) + self.encoder.pos_embed[:, 1:]
        tokens = self.encoder.encode(
            torch.cat([self.dist_token.expand(len(patches), -1, -1), patches], dim=1)
        )
        return self.head(tokens[:, 0]).float(), self.head_dist(tokens[:, 1]).float()

    def logits(self, images: Tensor) -> Tensor:
        """Classifies normalized images by both heads: logarithms (B, K) of their mean distribution."""
        first, second = (logits.log_softmax(dim=-1) for logits in self.both(images))
        return torch.logaddexp(first, second) - torch.tensor(2.0).log()

    def forward(self, batch: Batch) -> ObjectiveOutput:
        """Computes the weighted sum of both heads' losses."""
        images, targets = self.labels.targets(batch)
        logits, taught_logits = self.both(self.normalize(images))
        labeled = self.labels.cross_entropy(logits, targets)
        taught = self.distillation.loss(taught_logits, self.distillation.teacher(images))
        weight = self.distillation.weight
        output = self.labels.output((1 - weight) * labeled + weight * taught, logits, targets)
        count = torch.ones((), device=labeled.device)
        parts = {"label_loss": (labeled.detach(), count), "teacher_loss": (taught.detach(), count)}
        return ObjectiveOutput(output.loss, {**output.values, **parts})
