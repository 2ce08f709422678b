"""Metrics of a classifier's predictions: accuracy, accuracy by class, confusion, calibration.

Shapes: n images, K classes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

# Bins of the expected calibration error (Guo et al., arXiv 1706.04599, Sec. 5).
_BINS = 15
# Rules of thumb: a larger gap to the test accuracy is over-fitting, a lower training accuracy under-fitting.
_LARGE_GAP = 0.10
_LEARNED = 0.80
# 95 % of a normal distribution lie within this many standard deviations.
_Z_95 = 1.959964


@dataclass(frozen=True)
class Predictions:
    """A classifier's predictions for n images.

    Attributes:
        labels: int64 (n,), true classes.
        classes: int64 (n,), predicted classes.
        confidences: (n,), probability of the predicted class, 0 to 1.
        in_top5: bool (n,), whether the true class is among the five most probable.
    """

    labels: np.ndarray
    classes: np.ndarray
    confidences: np.ndarray
    in_top5: np.ndarray

    def __len__(self) -> int:
        """Number of images."""
        return len(self.labels)

    @property
    def top1(self) -> float:
        """Share of images whose predicted class is correct."""
        return float((self.labels == self.classes).mean())

    @property
    def top5(self) -> float:
        """Share of images whose class is among the five most probable."""
        return float(self.in_top5.mean())

    @property
    def most_frequent(self) -> float:
        """Share of the most frequent true class: the accuracy of always predicting it."""
        return float(np.bincount(self.labels).max()) / len(self.labels)

    def confusion(self, num_classes: int) -> np.ndarray:
        """Counts images by true class (row) and predicted class (column): int64 (K, K)."""
        flat = self.labels * num_classes + self.classes
        return np.bincount(flat, minlength=num_classes**2).reshape(num_classes, num_classes)

    def per_class(self, num_classes: int) -> list[float | None]:
        """Computes the accuracy of each class; None for a class without images."""
        counts = self.confusion(num_classes)
        hits, totals = counts.diagonal(), counts.sum(axis=1)
        return [float(hit / total) if total else None for hit, total in zip(hits, totals, strict=True)]

    @property
    def calibration_error(self) -> float:
        """Expected calibration error: the mean gap between confidence and accuracy over 15 equal bins."""
        edges = np.linspace(0, 1, _BINS + 1)[1:-1]
        bins = np.digitize(self.confidences, edges, right=True)
        gaps = np.bincount(bins, self.confidences - (self.labels == self.classes), minlength=_BINS)
        return float(np.abs(gaps).sum() / len(self.labels))


def interval_of_share(share: float, images: int) -> tuple[float, float]:
    """Returns Wilson's 95 % interval of an accuracy (E. B. Wilson, JASA 22, 1927): what other images might give."""
    spread = _Z_95**2 / images
    middle = (share + spread / 2) / (1 + spread)
    half = np.sqrt(share * (1 - share) * spread + spread**2 / 4) / (1 + spread)
    # At 0 and 1, rounding could leave the share outside.
    return min(share, float(middle - half)), max(share, float(middle + half))


def interpret_gap(train_top1: float, test_top1: float, *, unknown: float = 0.0) -> str:
    """Compares the accuracy on training images, not augmented, with that on test images, in one sentence.

    `unknown` is the fraction of test images whose class has no training image.
    """
    gap = train_top1 - test_top1
    scores = f"train {train_top1:.1%}, test {test_top1:.1%}, gap {100 * gap:.1f} points"
    if unknown:
        return (
            f"{scores}: {unknown:.1%} of the test images have classes without training images, so they cannot be "
            "right; do the names of the classes agree?"
        )
    if gap >= _LARGE_GAP:
        reading = "over-fitting: the accuracy is much higher on training images"
        return f"{scores}: {reading}" + (", though not yet high there" if train_top1 < _LEARNED else "")
    if train_top1 < _LEARNED:
        return f"{scores}: under-fitting or too few steps: the accuracy is low even on training images"
    return f"{scores}: no strong over-fitting or under-fitting"
