"""Metrics of segmentation: intersection over union by class, its mean, pixel accuracy.

Shapes: n images, K classes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

# A run's file of counts by test image, and of some images with their classes.
IMAGES_FILE = "images.npz"


def count_overlaps(classes: Tensor, truth: Tensor, num_classes: int) -> tuple[Tensor, Tensor]:
    """Counts the pixels of each image in the intersection and in the union of prediction and truth, by class.

    Both are int64 (B, H, W); truth is -1 where a pixel does not count.

    Returns:
        float64 (B, K) each.
    """
    batch = torch.arange(len(truth), device=truth.device)[:, None, None]
    counted = truth >= 0

    def count(values: Tensor, chosen: Tensor) -> Tensor:
        flat = (batch * num_classes + values)[chosen]
        return torch.bincount(flat, minlength=len(truth) * num_classes).view(-1, num_classes).double()

    both = count(truth, counted & (classes == truth))
    return both, count(truth, counted) + count(classes, counted) - both


def mean_iou(intersections: np.ndarray, unions: np.ndarray) -> np.ndarray:
    """Averages intersection over union over the classes with a union: (..., K) each -> (...).

    A class that is absent and not predicted does not count (as in mmsegmentation). Without classes the mean is 1.
    """
    there = unions > 0
    ious = np.where(there, intersections / np.maximum(unions, 1), 0.0)
    number = there.sum(axis=-1)
    means: np.ndarray = np.where(number > 0, ious.sum(axis=-1) / np.maximum(number, 1), 1.0)
    return means


@dataclass(frozen=True)
class Overlaps:
    """Counts of pixels by image and class.

    Attributes:
        intersections: float64 (n, K).
        unions: float64 (n, K).
    """

    intersections: np.ndarray
    unions: np.ndarray

    def __len__(self) -> int:
        """Number of images."""
        return len(self.unions)

    @property
    def pixels(self) -> np.ndarray:
        """Counted pixels of each image, (n,): a wrong one is in two unions, of its true and its predicted class."""
        counts: np.ndarray = (self.intersections.sum(axis=1) + self.unions.sum(axis=1)) / 2
        return counts

    @property
    def miou(self) -> float:
        """Mean intersection over union of the classes, on the pixels of all images together."""
        return float(mean_iou(self.intersections.sum(axis=0), self.unions.sum(axis=0)))

    @property
    def miou_by_image(self) -> np.ndarray:
        """Each image's mean over the classes in it or predicted, (n,)."""
        return mean_iou(self.intersections, self.unions)

    @property
    def pixel_accuracy(self) -> float:
        """Share of the pixels that have the right class."""
        return float(self.intersections.sum() / max(self.pixels.sum(), 1.0))

    @property
    def pixel_accuracy_by_image(self) -> np.ndarray:
        """Pixel accuracy of each image, (n,)."""
        shares: np.ndarray = self.intersections.sum(axis=1) / np.maximum(self.pixels, 1.0)
        return shares

    def per_class(self) -> list[float | None]:
        """Intersection over union of each class; None for a class that is absent and not predicted."""
        both, either = self.intersections.sum(axis=0), self.unions.sum(axis=0)
        return [float(b / e) if e else None for b, e in zip(both, either, strict=True)]
