"""The targets of masked patch prediction: the colors of a patch, or its pixels (ViT App. B.1.2).

Shapes: B batch, C channels, N patches, M corrupted patches, P patch size, A areas of a patch, K color classes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor

from mae_vit.core.batch import Batch
from mae_vit.core.image_rows import Picture
from mae_vit.models.masking import KIND_MASK, Corruption, nearest_visible
from mae_vit.models.patches import class_colors, downsized_color_classes, patchify, take_tokens, unpatchify
from mae_vit.objectives.objective import Objective
from mae_vit.objectives.reconstruction import error_sums, local_average, psnr_metrics, reconstruction_pictures

# Areas along a side of a patch. Each area is predicted as one color.
COLOR_CELLS = {"mean_color": 1, "downsized_4x4": 4}


class PatchTarget(ABC):
    """Turns a prediction at corrupted positions, (B, M, num_outputs), into loss, metrics and pictures."""

    num_outputs: int

    @abstractmethod
    def loss(self, prediction: Tensor, batch: Batch, corruption: Corruption) -> Tensor:
        """Computes the mean over all corrupted positions."""

    @abstractmethod
    def values(
        self, prediction: Tensor, batch: Batch, corruption: Corruption
    ) -> dict[str, tuple[Tensor, Tensor]]:
        """Returns named (sum, count) pairs to log in training."""

    @abstractmethod
    def sums(self, prediction: Tensor, batch: Batch, corruption: Corruption) -> dict[str, Tensor]:
        """Returns sums over held-out images, for the model and for a baseline without learning."""

    @abstractmethod
    def metrics(self, sums: dict[str, float]) -> dict[str, float]:
        """Turns total sums into metrics."""

    @abstractmethod
    def pictures(self, prediction: Tensor, batch: Batch, corruption: Corruption) -> list[Picture]:
        """Shows masked, predicted, pasted, original."""


class ColorTarget(PatchTarget):
    """Classifies the 3-bit colors of the `cells` x `cells` areas of a patch in parallel.

    With one area this is the paper's mean color; 4 x 4 areas are its second variant.
    """

    def __init__(self, objective: Objective, cells: int) -> None:
        """Predicts `cells` x `cells` colors for each patch of the objective's images."""
        self._encoder = objective.encoder
        self._cells = cells
        self._classes = 8**objective.encoder.in_chans
        self.num_outputs = cells * cells * self._classes

    def _all_classes(self, batch: Batch) -> Tensor:
        return downsized_color_classes(batch.images, self._encoder.patch_size, self._cells)

    def _aligned(self, prediction: Tensor, batch: Batch, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Returns logits (B, M, A, K) and classes (B, M, A)."""
        logits = prediction.float().unflatten(-1, (-1, self._classes))  # (B, M, A, K)
        return logits, take_tokens(self._all_classes(batch), ids)

    def loss(self, prediction: Tensor, batch: Batch, corruption: Corruption) -> Tensor:
        """Computes the mean cross-entropy over corrupted positions and areas."""
        logits, classes = self._aligned(prediction, batch, corruption.ids)
        return F.cross_entropy(logits.flatten(0, 2), classes.flatten())

    def values(  # noqa: D102
        self, prediction: Tensor, batch: Batch, corruption: Corruption
    ) -> dict[str, tuple[Tensor, Tensor]]:
        sums = self._hits(prediction, batch, corruption)
        return {"accuracy_on_mask": (sums["hits"], sums["on_mask"])}

    def _hits(self, prediction: Tensor, batch: Batch, corruption: Corruption) -> dict[str, Tensor]:
        logits, classes = self._aligned(prediction, batch, corruption.ids)
        on_mask = (corruption.kind == KIND_MASK)[..., None].expand_as(classes)  # (B, M, A)
        return {
            "on_mask": on_mask.sum().float(),
            "hits": ((logits.argmax(dim=-1) == classes) & on_mask).sum().float(),
        }

    def sums(self, prediction: Tensor, batch: Batch, corruption: Corruption) -> dict[str, Tensor]:
        """Counts hits on [mask] positions, for the model and for a copy of the nearest visible patch."""
        logits, classes = self._aligned(prediction, batch, corruption.ids)
        nearest = nearest_visible(corruption.mask, self._encoder.grid_size).gather(1, corruption.ids)
        copied = take_tokens(self._all_classes(batch), nearest)  # (B, M, A)
        on_mask = (corruption.kind == KIND_MASK)[..., None]  # (B, M, 1)
        return {
            "predicted": torch.tensor(float(classes.numel()), device=classes.device),
            "loss": F.cross_entropy(logits.flatten(0, 2), classes.flatten(), reduction="sum"),
            **self._hits(prediction, batch, corruption),
            "hits_nearest": ((copied == classes) & on_mask).sum().float(),
        }

    def metrics(self, sums: dict[str, float]) -> dict[str, float]:
        """Returns the loss over corrupted positions, and the accuracy on [mask] positions with its baseline."""
        return {
            "loss": sums["loss"] / sums["predicted"],
            "accuracy_on_mask": sums["hits"] / max(sums["on_mask"], 1),
            "accuracy_nearest_visible": sums["hits_nearest"] / max(sums["on_mask"], 1),
        }

    def pictures(self, prediction: Tensor, batch: Batch, corruption: Corruption) -> list[Picture]:
        """Shows masked, predicted, pasted, original; each area has one color."""
        encoder, cells = self._encoder, self._cells
        logits, _ = self._aligned(prediction, batch, corruption.ids)
        ids = corruption.ids[..., None].expand(-1, -1, cells * cells)  # (B, M, A)
        classes = self._all_classes(batch).scatter(1, ids, logits.argmax(dim=-1))  # (B, N, A)
        p, img_size, channels = encoder.patch_size, encoder.img_size, encoder.in_chans
        # Each pixel gets the color of its area.
        colors = (class_colors(classes, channels) / 255).unflatten(2, (cells, cells))
        pixels = colors.repeat_interleave(p // cells, 2).repeat_interleave(p // cells, 3).flatten(2)
        painted = unpatchify(pixels, p, img_size)  # (B, C, H, W)
        hidden = unpatchify(corruption.mask[..., None].expand(-1, -1, p * p), p, img_size)  # (B, 1, H, W)
        original = batch.images.float() / 255
        return [
            Picture("masked", original * (1 - hidden) + 0.5 * hidden),
            Picture("predicted colors", painted * hidden + 0.5 * (1 - hidden)),
            Picture("pasted", original * (1 - hidden) + painted * hidden),
            Picture("original", original),
        ]


class PixelTarget(PatchTarget):
    """L2 regression of all normalized pixels of a patch (the paper's third variant)."""

    def __init__(self, objective: Objective) -> None:
        """Predicts the pixels of each patch of the objective's images."""
        self._objective = objective
        encoder = objective.encoder
        self.num_outputs = encoder.patch_size**2 * encoder.in_chans

    def _errors(self, prediction: Tensor, batch: Batch, corruption: Corruption) -> Tensor:
        """Computes the mean squared error of each corrupted patch: (B, M)."""
        images = self._objective.normalize(batch.images)
        target = take_tokens(patchify(images, self._objective.encoder.patch_size), corruption.ids)
        return (prediction.float() - target).square().mean(dim=-1)

    def loss(self, prediction: Tensor, batch: Batch, corruption: Corruption) -> Tensor:
        """Computes the mean squared error over corrupted positions."""
        return self._errors(prediction, batch, corruption).mean()

    def values(  # noqa: D102
        self, prediction: Tensor, batch: Batch, corruption: Corruption
    ) -> dict[str, tuple[Tensor, Tensor]]:
        return {}

    def _whole(self, prediction: Tensor, corruption: Corruption, images: Tensor) -> Tensor:
        """Returns the true patches with the prediction at corrupted positions: (B, N, P*P*C)."""
        ids = corruption.ids[..., None].expand(-1, -1, self.num_outputs)  # (B, M, P*P*C)
        return patchify(images, self._objective.encoder.patch_size).scatter(1, ids, prediction.float())

    def sums(self, prediction: Tensor, batch: Batch, corruption: Corruption) -> dict[str, Tensor]:
        """Sums the loss over corrupted positions, and squared errors on [mask] positions with a baseline's."""
        images = self._objective.normalize(batch.images)
        on_mask = torch.zeros_like(corruption.mask)  # (B, N)
        on_mask.scatter_(1, corruption.ids, (corruption.kind == KIND_MASK).to(on_mask.dtype))
        baseline = local_average(images, corruption.mask, self._objective.encoder)
        whole = self._whole(prediction, corruption, images)
        errors = self._errors(prediction, batch, corruption)
        return {
            "predicted": torch.tensor(float(errors.numel()), device=errors.device),
            "loss": errors.sum(),
            **error_sums(self._objective, images, whole, baseline, on_mask),
        }

    def metrics(self, sums: dict[str, float]) -> dict[str, float]:
        """Returns the loss over corrupted positions, and PSNR on [mask] positions with the local average's."""
        return {"loss": sums["loss"] / sums["predicted"], **psnr_metrics(sums)}

    def pictures(self, prediction: Tensor, batch: Batch, corruption: Corruption) -> list[Picture]:
        """Shows masked, predicted, pasted, original; visible patches are unchanged."""
        images = self._objective.normalize(batch.images)
        whole = self._whole(prediction, corruption, images)
        return reconstruction_pictures(self._objective, batch.images, whole, corruption.mask)


def make_target(objective: Objective, name: str) -> PatchTarget:
    """Makes the target called `name`."""
    if name == "pixels_l2":
        return PixelTarget(objective)
    return ColorTarget(objective, COLOR_CELLS[name])
