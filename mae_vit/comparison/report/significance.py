"""Tests whether one entry is better than another, paired over seeds and test images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from mae_vit.core.messages import format_decimal
from mae_vit.evaluation.segmentation import Overlaps, mean_iou


@dataclass(frozen=True)
class Scores:
    """Which test images a run classifies correctly, or how its masks overlap with the true ones.

    Attributes:
        seed: seed of the run; None if every seed gives the same result.
        correct: bool (n,), in the order of `keys`; empty for segmentation.
        keys: keys of the test images, sorted.
        overlaps: pixel counts by test image in the order of `keys`; None for classification.
    """

    seed: int | None
    correct: np.ndarray
    keys: tuple[str, ...]
    overlaps: Overlaps | None = None

    @property
    def score(self) -> float:
        """Accuracy, or mean intersection over union; 0 to 1."""
        return float(self.correct.mean()) if self.overlaps is None else self.overlaps.miou


# Draws in the bootstrap of images.
_DRAWS = 1000


@dataclass(frozen=True)
class Gap:
    """By how much one entry's test accuracy exceeds another's.

    Attributes:
        points: mean difference over seeds, in points.
        half_width: half of the 95 % interval, in points.
        seeds: number of paired seeds.
        p_images: p of McNemar's exact test on the test images (segmentation: Wilcoxon's signed-rank test on
            each image's mean IoU), for the seed with the weakest evidence.
        p_seeds: p of the paired t-test over seeds; None for one seed or equal differences.
    """

    points: float
    half_width: float
    seeds: int
    p_images: float
    p_seeds: float | None

    def in_brackets(self) -> str:
        """Formats a table cell: +3.2 [2.1, 4.3]; * for one seed, in parentheses if it may be chance."""
        # Clipped to possible differences of accuracies.
        low, high = max(self.points - self.half_width, -100.0), min(self.points + self.half_width, 100.0)
        interval = f"[{format_decimal(low)}, {format_decimal(high)}]"
        text = f"{format_decimal(self.points, '+')} {interval}" + ("*" if self.seeds == 1 else "")
        return text if self.is_clear else f"({text})"

    @property
    def is_clear(self) -> bool:
        """Whether the interval excludes zero."""
        return abs(self.points) > self.half_width


def gap_between(ours: Sequence[Scores], theirs: Sequence[Scores]) -> Gap | None:
    """Compares two entries seed by seed, image by image; None if they share no seed or differ in test images.

    A row that is the same for all seeds is compared with each row of the other entry. The interval covers the choice
    of test images and of seeds (`_half_width`); with one seed, of test images only. It does not cover another subset
    of labels, unless each seed draws its own, or other pretraining runs or data.
    """
    pairs = _pairs(ours, theirs)
    if not pairs or any(row.keys != other.keys for row, other in pairs):
        return None
    by_run = np.array([row.score - other.score for row, other in pairs])
    p_seeds = None
    if len(pairs) > 1 and np.ptp(by_run) > 1e-9:  # equal differences leave only rounding
        p_seeds = float(stats.ttest_1samp(by_run, 0.0).pvalue)
    p_images = max(_p_images(row, other) for row, other in pairs)
    if pairs[0][0].overlaps is None:
        differences = [row.correct.astype(float) - other.correct for row, other in pairs]
        half = _half_width(np.array(differences))  # (seeds, images)
    else:
        half = _half_width_of_overlaps(pairs, by_run)
    return Gap(100 * float(by_run.mean()), 100 * half, len(pairs), p_images, p_seeds)


def _half_width(differences: np.ndarray) -> float:
    """Returns half the 95 % interval of the mean of `differences` (seeds, images).

    Seeds and images are random effects in a two-way table without replication. The mean square of seeds (t with
    seeds - 1 degrees of freedom) covers the variance of seeds and the residual (seed x image). The mean square of
    images adds its excess over the residual, as a normal variable, so the residual counts once. Seeds that are alike by
    chance leave at least the interval of the images alone.
    `tests/runs/comparison/test_significance.py` simulates the coverage: 94 to 97 % for two to five seeds.
    """
    seeds, images = differences.shape
    by_run, by_image = differences.mean(axis=1), differences.mean(axis=0)
    ms_images, ms_rest = seeds * by_image.var(ddof=1), 0.0
    if seeds > 1:
        rest = differences - by_run[:, None] - by_image + differences.mean()
        ms_rest = float((rest**2).sum()) / ((seeds - 1) * (images - 1))
    scale = stats.norm.ppf(0.975) / np.sqrt(differences.size)
    both = np.hypot(scale * np.sqrt(max(ms_images - ms_rest, 0.0)), _half_width_of_seeds(by_run))
    return float(max(both, scale * np.sqrt(ms_images)))


def _half_width_of_seeds(by_run: np.ndarray) -> float:
    """Returns half the 95 % t interval of the mean of differences (seeds,); 0 for one seed."""
    seeds = len(by_run)
    return 0.0 if seeds == 1 else stats.t.ppf(0.975, seeds - 1) * by_run.std(ddof=1) / np.sqrt(seeds)


def _pairs(ours: Sequence[Scores], theirs: Sequence[Scores]) -> list[tuple[Scores, Scores]]:
    if ours[0].seed is None:
        return [(ours[0], other) for other in theirs]
    if theirs[0].seed is None:
        return [(row, theirs[0]) for row in ours]
    by_seed = {other.seed: other for other in theirs}
    return [(row, by_seed[row.seed]) for row in ours if row.seed in by_seed]


def _half_width_of_overlaps(pairs: Sequence[tuple[Scores, Scores]], by_run: np.ndarray) -> float:
    """Returns half the 95 % interval of a mean difference in mIoU; `by_run` (seeds,) are the differences.

    mIoU is not a mean over images, so a bootstrap of the test images gives its variance. This counts some of the
    variance between seeds twice: the interval is a little too wide.
    """
    images = len(pairs[0][0].keys)
    # How often each image is drawn. A constant seed makes the report reproducible.
    drawn = np.random.default_rng(0).multinomial(images, np.full(images, 1 / images), size=_DRAWS)
    gaps = [
        mean_iou(drawn @ row.intersections, drawn @ row.unions)
        - mean_iou(drawn @ other.intersections, drawn @ other.unions)
        for row, other in ((a.overlaps, b.overlaps) for a, b in pairs)
        if row is not None and other is not None
    ]
    from_images = stats.norm.ppf(0.975) * np.mean(gaps, axis=0).std(ddof=1)
    return float(np.hypot(from_images, _half_width_of_seeds(by_run)))


def _p_images(row: Scores, other: Scores) -> float:
    if row.overlaps is None or other.overlaps is None:
        return mcnemar(row.correct, other.correct)
    gaps = row.overlaps.miou_by_image - other.overlaps.miou_by_image
    return float(stats.wilcoxon(gaps).pvalue) if np.any(gaps) else 1.0


def mcnemar(correct: np.ndarray, others: np.ndarray) -> float:
    """Returns the two-sided p of McNemar's exact test (1947; binomial form) on two classifiers' hits, bool (n,)."""
    won, lost = int((correct & ~others).sum()), int((~correct & others).sum())
    if won + lost == 0:
        return 1.0
    return float(stats.binomtest(won, won + lost).pvalue)
