"""The networks that predict the class of each pixel, their loss and their held-out metrics."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mae_vit.core.batch import Batch
from mae_vit.core.image_rows import Picture
from mae_vit.evaluation.segmentation import count_overlaps, mean_iou
from mae_vit.finetuning.segmentation.networks import LightHead, LinearHead, patch_map
from mae_vit.inspection.class_maps import class_colors
from mae_vit.models.encoders.base import Encoder
from mae_vit.objectives.objective import ObjectiveOutput, Task
from mae_vit.weights.foreign_encoder import ForeignEncoder

# Share of the class's color in a picture.
_TINT = 0.6


class Segmenter(Task):
    """A network that is trained by the cross-entropy of its pixels.

    Shapes: B batch, C channels, H W pixels, D h w the feature map, K classes.
    """

    def __init__(
        self,
        *,
        width: int,
        num_classes: int,
        probe: bool,
        label_smoothing: float,
        mean: Sequence[float],
        std: Sequence[float],
    ) -> None:
        """Adds a head to a map of `width` channels: a linear one for a `probe`, which trains nothing else."""
        super().__init__(mean=mean, std=std)
        self.num_classes, self.probe, self.label_smoothing = num_classes, probe, label_smoothing
        self.decode_head: nn.Module = (LinearHead if probe else LightHead)(width, num_classes)

    @abstractmethod
    def feature_map(self, images: Tensor) -> Tensor:
        """Encodes normalized images: (B, C, H, W) -> (B, D, h, w)."""

    def logits(self, images: Tensor) -> Tensor:
        """Scores the pixels of raw images: uint8 (B, C, H, W) -> float32 (B, K, H, W)."""
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.probe):
            features = self.feature_map(self.normalize(images))
        scores = self.decode_head(features).float()
        return F.interpolate(scores, images.shape[2:], mode="bilinear", align_corners=False)

    def _losses(self, logits: Tensor, truth: Tensor, *, label_smoothing: float = 0.0) -> Tensor:
        """Computes each image's mean cross-entropy over the pixels that count, 0 without any: (B,).

        The mean over images of any split of a batch is that of the whole batch.
        """
        losses = F.cross_entropy(
            logits, truth, ignore_index=-1, reduction="none", label_smoothing=label_smoothing
        )
        return losses.sum(dim=(1, 2)) / (truth >= 0).sum(dim=(1, 2)).clamp(min=1)

    def forward(self, batch: Batch) -> ObjectiveOutput:
        """Computes the mean cross-entropy, and the pixel accuracy on the augmented training images."""
        logits = self.logits(batch.images)
        # The cost of a run is estimated on images alone.
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
        sums = {
            "images": torch.tensor(float(len(truth)), device=truth.device),
            "loss": self._losses(logits, truth).sum(),
            "pixels": (truth >= 0).sum(),
        }
        for name, counts in (("intersection", both), ("union", either)):
            sums |= {f"{name} {k:05d}": count for k, count in enumerate(counts.sum(dim=0).unbind())}
        return sums

    def evaluation_metrics(self, sums: dict[str, float]) -> dict[str, float]:
        """Returns the loss without smoothing, the mean intersection over union, and the pixel accuracy."""
        both, either = (
            np.array([sums[f"{name} {k:05d}"] for k in range(self.num_classes)])
            for name in ("intersection", "union")
        )
        return {
            "loss": sums["loss"] / sums["images"],
            "miou": float(mean_iou(both, either)),
            "pixel_accuracy": float(both.sum()) / max(sums["pixels"], 1.0),
        }

    def pictures(self, batch: Batch) -> list[Picture]:
        """Shows predicted and true classes over the images, and the images."""
        original = batch.images.float() / 255
        maps = {"predicted": self.logits(batch.images).argmax(dim=1), "true": batch.class_map()}
        return [
            *(Picture(name, tinted(original, classes, self.num_classes)) for name, classes in maps.items()),
            Picture("original", original),
        ]

    def train(self, mode: bool = True) -> Segmenter:
        """Sets the mode; of a probe that of the head alone: frozen features have no dropout."""
        super().train(mode)
        if self.probe:
            for name, child in self.named_children():
                if name != "decode_head":
                    child.eval()
        return self


def tinted(images: Tensor, classes: Tensor, num_classes: int) -> Tensor:
    """Lays the colors of classes int64 (B, H, W) over images (B, C, H, W) in 0..1: (B, 3, H, W)."""
    colors = torch.from_numpy(class_colors(num_classes)).to(images.device).float() / 255
    tint = colors[classes.clamp(min=0)].permute(0, 3, 1, 2)
    return torch.where((classes > 0)[:, None], (1 - _TINT) * images + _TINT * tint, images)


class ViTSegmenter(Segmenter):
    """One of our encoders, by the map of its patch tokens."""

    def __init__(
        self,
        encoder: Encoder,
        *,
        num_classes: int,
        probe: bool,
        label_smoothing: float,
        mean: Sequence[float],
        std: Sequence[float],
        freeze_patch_embed: bool = False,
    ) -> None:
        """Adds a head to `encoder`; a `probe` freezes the encoder, `freeze_patch_embed` its patch projection."""
        super().__init__(
            width=encoder.embed_dim,
            num_classes=num_classes,
            probe=probe,
            label_smoothing=label_smoothing,
            mean=mean,
            std=std,
        )
        self.encoder = encoder
        # A fixed table of positions, and what is asked for.
        self._fixed = {name for name, value in encoder.named_parameters() if not value.requires_grad}
        if freeze_patch_embed:
            self._fixed |= {f"patch_embed.{name}" for name, _ in encoder.patch_embed.named_parameters()}
        self.freeze(probe)
        self.train()

    def freeze(self, frozen: bool) -> None:
        """Freezes the encoder, or trains it; a fixed table of positions and a frozen projection stay as they are."""
        for name, value in self.encoder.named_parameters():
            value.requires_grad_(not frozen and name not in self._fixed)

    def feature_map(self, images: Tensor) -> Tensor:
        """Encodes normalized images: (B, C, H, W) -> (B, D, h, w)."""
        return patch_map(self.encoder, images)


class ForeignSegmenter(Segmenter):
    """A probe of an encoder of others, by its last map of features. Nothing trains the encoder."""

    def __init__(
        self,
        encoder: ForeignEncoder,
        *,
        num_classes: int,
        label_smoothing: float,
        mean: Sequence[float],
        std: Sequence[float],
    ) -> None:
        """Adds a linear head to the map, whose width one pass of a black image tells.

        Raises:
            InputError: if timm gives no map of features for the network.
        """
        with torch.no_grad():
            black = torch.zeros(1, encoder.input.in_chans, *encoder.input.img_size)
            width = encoder.patch_map(black).shape[1]
        super().__init__(
            width=width,
            num_classes=num_classes,
            probe=True,
            label_smoothing=label_smoothing,
            mean=mean,
            std=std,
        )
        self.encoder = encoder
        self.train()

    def feature_map(self, images: Tensor) -> Tensor:
        """Encodes normalized images: (B, C, H, W) -> (B, D, h, w)."""
        return self.encoder.patch_map(images)


class NetworkSegmenter(Segmenter):
    """Any other network, by its last feature map."""

    def __init__(
        self,
        network: nn.Module,
        *,
        width: int,
        num_classes: int,
        label_smoothing: float,
        mean: Sequence[float],
        std: Sequence[float],
    ) -> None:
        """Adds a head to `network`, (B, C, H, W) -> (B, D, h, w)."""
        super().__init__(
            width=width,
            num_classes=num_classes,
            probe=False,
            label_smoothing=label_smoothing,
            mean=mean,
            std=std,
        )
        self.network = network

    def feature_map(self, images: Tensor) -> Tensor:
        """Encodes normalized images: (B, C, H, W) -> (B, D, h, w)."""
        features: Tensor = self.network(images)
        return features
