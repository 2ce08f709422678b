"""The network that predicts the class of each pixel, its heads, its loss and its held-out metrics.

Shapes: B batch, C channels, H W pixels, D width of the feature map, h w its rows and columns, K classes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import Unpack

from mae_vit.core.batch import Batch
from mae_vit.core.image_rows import Picture
from mae_vit.evaluation.segmentation import count_overlaps, mean_iou
from mae_vit.inspection.class_maps import class_tint
from mae_vit.models.encoders.base import Encoder, LoadReport, as_map
from mae_vit.objectives.objective import ObjectiveOutput, Pixels, Task
from mae_vit.weights.load import check_complete, load_weights
from mae_vit.weights.read import Weights

# Width of the light head: that of the map divided by this, and at least this many channels.
_HEAD_FRACTION, _HEAD_LEAST = 4, 64
_GROUPS = 8


class LinearHead(nn.Module):
    """A norm over the batch without affine parameters, and one linear layer for each token (as MAE's linear probe)."""

    def __init__(self, width: int, num_classes: int) -> None:
        """Maps (B, D, h, w) -> (B, K, h, w)."""
        super().__init__()
        self.norm = nn.BatchNorm2d(width, affine=False, eps=1e-6)
        self.classifier = nn.Conv2d(width, num_classes, 1)
        for parameter in self.classifier.parameters():
            nn.init.zeros_(parameter)

    def forward(self, features: Tensor) -> Tensor:
        """Computes (B, D, h, w) -> (B, K, h, w)."""
        return self.classifier(self.norm(features))


class LightHead(nn.Module):
    """Two steps of a 3x3 convolution, group norm, GELU and twofold upsampling; then a 1x1 convolution.

    Progressive upsampling (SETR-PUP, arXiv 2012.15840, Sec. 3.3), but narrower and with two steps.
    """

    def __init__(self, width: int, num_classes: int) -> None:
        """Maps (B, D, h, w) -> (B, K, 4h, 4w)."""
        super().__init__()
        inner = max(_HEAD_LEAST, width // _HEAD_FRACTION // _GROUPS * _GROUPS)
        self.steps = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(before, inner, 3, padding=1, bias=False), nn.GroupNorm(_GROUPS, inner), nn.GELU()
            )
            for before in (width, inner)
        )
        self.classifier = nn.Conv2d(inner, num_classes, 1)

    def forward(self, features: Tensor) -> Tensor:
        """Computes (B, D, h, w) -> (B, K, 4h, 4w)."""
        for step in self.steps:
            features = F.interpolate(step(features), scale_factor=2, mode="bilinear", align_corners=False)
        return self.classifier(features)


class Segmenter(Task):
    """An encoder's map of features and a head, trained by the cross-entropy of its pixels."""

    def __init__(
        self,
        encoder: Encoder,
        *,
        probe: bool,
        num_classes: int,
        label_smoothing: float,
        **pixels: Unpack[Pixels],
    ) -> None:
        """Adds a head to `encoder`: a linear one for a `probe`, which trains nothing else."""
        super().__init__(**pixels)
        self.num_classes, self.probe, self.label_smoothing = num_classes, probe, label_smoothing
        self.decode_head: nn.Module = (LinearHead if probe else LightHead)(encoder.embed_dim, num_classes)
        self.encoder = encoder
        # Always frozen: fixed positions.
        self._fixed = {name for name, value in encoder.named_parameters() if not value.requires_grad}
        self.freeze(probe)
        self.train()

    def freeze(self, frozen: bool) -> None:
        """Freezes or unfreezes the encoder; what is always frozen stays so."""
        for name, value in self.encoder.named_parameters():
            value.requires_grad_(not frozen and name not in self._fixed)

    def train(self, mode: bool = True) -> Segmenter:
        """Sets the mode; a probe's encoder stays in evaluation mode, without dropout."""
        super().train(mode)
        if self.probe:
            self.encoder.eval()
        return self

    def load(self, weights: Weights) -> LoadReport:
        """Loads pretrained weights into a fresh encoder; returns how each tensor was loaded.

        Raises:
            InputError: if they do not fit; names the difference.
        """
        if self.encoder.has_final_norm and "norm.weight" not in weights.tensors:
            # A classifier that pools the mean has its norm after the mean (`fc_norm`); here it norms each token.
            tensors = {name.removeprefix("fc_"): value for name, value in weights.tensors.items()}
            weights = replace(weights, tensors=tensors)
        report = load_weights(weights, self.encoder)
        if self.probe:
            check_complete(weights, report.random)
        report.by_design["decode_head"] = "new: for the classes of these masks"
        return report

    def feature_map(self, images: Tensor) -> Tensor:
        """Encodes normalized images: (B, C, H, W) -> (B, D, h, w), with the final norm."""
        return as_map(self.encoder, self.encoder.forward_features(images))

    def logits(self, images: Tensor) -> Tensor:
        """Scores the pixels of raw images: (B, C, H, W) -> float32 (B, K, H, W)."""
        return self.score(self.normalize(images))

    def score(self, images: Tensor) -> Tensor:
        """Does the same for normalized images."""
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.probe):
            features = self.feature_map(images)
        scores = self.decode_head(features).float()
        return F.interpolate(scores, images.shape[2:], mode="bilinear", align_corners=False)

    def _losses(self, logits: Tensor, truth: Tensor, *, label_smoothing: float = 0.0) -> Tensor:
        """Computes each image's mean cross-entropy over the pixels that count, 0 without any: (B,).

        A mean over images does not depend on how a batch is split.
        """
        losses = F.cross_entropy(
            logits, truth, ignore_index=-1, reduction="none", label_smoothing=label_smoothing
        )
        return losses.sum(dim=(1, 2)) / (truth >= 0).sum(dim=(1, 2)).clamp(min=1)

    def forward(self, batch: Batch) -> ObjectiveOutput:
        """Computes the mean cross-entropy, and the pixel accuracy on the augmented training images."""
        logits = self.logits(batch.images)
        # Costs are estimated on images without masks.
        truth = (
            torch.zeros_like(logits[:, 0], dtype=torch.int64) if batch.masks is None else batch.class_map()
        )
        loss = self._losses(logits, truth, label_smoothing=self.label_smoothing).mean()
        with torch.no_grad():
            hits, counted = (logits.argmax(dim=1) == truth).sum(), (truth >= 0).sum()
        return ObjectiveOutput(loss, {"pixel_accuracy": (hits, counted)})

    def evaluation_sums(self, batch: Batch) -> dict[str, Tensor]:
        """Sums the loss, and the pixels in the intersection and the union of each class."""
        logits, truth = self.logits(batch.images), batch.class_map()
        both, either = count_overlaps(logits.argmax(dim=1), truth, self.num_classes)
        return {
            "images": torch.tensor(float(len(truth)), device=truth.device),
            "loss": self._losses(logits, truth).sum(),
            "pixels": (truth >= 0).sum(),
            "intersections": both.sum(dim=0),
            "unions": either.sum(dim=0),
        }

    def evaluation_metrics(self, sums: dict[str, Any]) -> dict[str, float]:
        """Returns the loss without smoothing, the mean intersection over union, and the pixel accuracy."""
        return {
            "loss": sums["loss"] / sums["images"],
            "miou": float(mean_iou(sums["intersections"], sums["unions"])),
            "pixel_accuracy": float(sums["intersections"].sum()) / max(sums["pixels"], 1.0),
        }

    def pictures(self, batch: Batch) -> list[Picture]:
        """Shows predicted and true classes over the images, and the images."""
        original = self.unit(batch.images)
        maps = {"predicted": self.logits(batch.images).argmax(dim=1), "true": batch.class_map()}
        return [
            *(
                Picture(name, original, class_tint(classes, self.num_classes))
                for name, classes in maps.items()
            ),
            Picture("original", original),
        ]
