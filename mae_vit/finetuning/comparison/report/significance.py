"""Whether one entry is better than another: paired over seeds, and over test images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from mae_vit.finetuning.comparison.report.rows import Row


@dataclass(frozen=True)
class Gap:
    """By how much one entry's test accuracy exceeds another's.

    Attributes:
        points: mean difference over seeds, in points.
        half_width: of the 95 % interval, in points.
        seeds: how many are paired.
        p_images: McNemar's exact test on the test images, the seed that speaks least for a
            difference.
        p_seeds: paired t-test over seeds; None for less than two.
    """

    points: float
    half_width: float
    seeds: int
    p_images: float
    p_seeds: float | None

    def describe(self) -> str:
        """Returns text such as +3.2 points (95 %: 2.1 to 4.3); it states if there is only one seed."""
        low, high = self._range
        of = ", one seed, test images alone" if self.seeds == 1 else ""
        return f"{self.points:+.1f} points (95 %{of}: {low:.1f} to {high:.1f})"

    def in_brackets(self) -> str:
        """For a table: +3.2 [2.1, 4.3]; starred if of one seed, in parentheses if chance may explain it."""
        low, high = self._range
        text = f"{self.points:+.1f} [{low:.1f}, {high:.1f}]" + ("*" if self.seeds == 1 else "")
        return text if self.is_clear else f"({text})"

    @property
    def _range(self) -> tuple[float, float]:
        """Returns the interval, clipped to possible differences of accuracies."""
        return max(self.points - self.half_width, -100.0), min(self.points + self.half_width, 100.0)

    @property
    def is_clear(self) -> bool:
        """Whether the interval leaves out zero."""
        return abs(self.points) > self.half_width


def gap_between(rows: Sequence[Row], others: Sequence[Row]) -> Gap | None:
    """Compares two entries seed by seed, image by image; None where no seed is in both.

    A row that is the same for all seeds is compared with each of the other entry's.

    The interval adds two independent sources: which images are tested (normal, from the
    differences by image, averaged over seeds) and which seed trained (t distribution over
    the paired seeds; unknown, and left out, with one). It says nothing of another subset
    of labels, another pretraining run or other data.
    """
    pairs = _pairs(rows, others)
    if not pairs or any(one.keys != other.keys for one, other in pairs):
        return None
    differences = np.array([one.correct.astype(float) - other.correct for one, other in pairs])
    by_image, by_run = differences.mean(axis=0), differences.mean(axis=1)
    count, images = len(pairs), len(by_image)
    from_images = stats.norm.ppf(0.975) * by_image.std(ddof=1) / np.sqrt(images)
    from_seeds, p_seeds = 0.0, None
    if count > 1:
        spread = by_run.std(ddof=1) / np.sqrt(count)
        from_seeds = stats.t.ppf(0.975, count - 1) * spread
        # Equal ones leave a spread of rounding.
        clear = np.ptp(by_run) > 0
        p_seeds = float(2 * stats.t.sf(abs(by_run.mean()) / spread, count - 1)) if clear else None
    p_images = max(mcnemar(one.correct, other.correct) for one, other in pairs)
    half = 100 * float(np.hypot(from_images, from_seeds))
    return Gap(100 * float(by_run.mean()), half, count, p_images, p_seeds)


def _pairs(rows: Sequence[Row], others: Sequence[Row]) -> list[tuple[Row, Row]]:
    if rows[0].cell.fixed:
        return [(rows[0], other) for other in (others[:1] if others[0].cell.fixed else others)]
    if others[0].cell.fixed:
        return [(row, others[0]) for row in rows]
    by_seed = {row.cell.seed: row for row in others}
    return [(row, by_seed[row.cell.seed]) for row in rows if row.cell.seed in by_seed]


def mcnemar(correct: np.ndarray, others: np.ndarray) -> float:
    """Returns the two-sided p-value of McNemar's exact test (McNemar 1947; binomial form).

    Args:
        correct: bool (n,), of one classifier.
        others: bool (n,), of another on the same images.
    """
    won, lost = int((correct & ~others).sum()), int((~correct & others).sum())
    if won + lost == 0:
        return 1.0
    return float(stats.binomtest(won, won + lost).pvalue)
