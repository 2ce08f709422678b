"""The numbers that a comparison's claims rest on, against others' and by hand."""

from dataclasses import replace

import numpy as np
import pytest
from helpers.comparison import gap_of, row
from scipy import stats

from mae_vit.comparison.report.significance import mcnemar


def test_mcnemar_by_hand():
    # Seven images speak for one, one for the other: 2 (C(8, 0) + C(8, 1)) / 2^8.
    ours = np.array([True] * 7 + [False] + [True] * 20 + [False] * 5)
    theirs = np.array([False] * 7 + [True] + [True] * 20 + [False] * 5)
    assert mcnemar(ours, theirs) == pytest.approx(18 / 256)
    assert mcnemar(theirs, ours) == pytest.approx(18 / 256)
    assert mcnemar(ours, ours) == 1


def test_a_gap_is_paired_by_seed_and_image():
    generator = np.random.default_rng(0)
    truth = generator.random((3, 400))
    ours = [row("ours", seed, truth[seed] < 0.7) for seed in range(3)]
    theirs = [row("theirs", seed, truth[seed] < 0.6) for seed in (2, 0, 1)]
    gap = gap_of(ours, theirs)
    differences = np.stack([(truth[s] < 0.7) * 1.0 - (truth[s] < 0.6) for s in range(3)])
    assert gap.seeds == 3
    assert gap.points == pytest.approx(100 * differences.mean())
    # Mean squares of a two-way table, each cell written out; t(0.975, 2) and z(0.975), from the tables.
    grand, by_run, by_image = differences.mean(), differences.mean(axis=1), differences.mean(axis=0)
    ms_seeds = 400 * sum((mean - grand) ** 2 for mean in by_run) / 2
    ms_images = 3 * sum((mean - grand) ** 2 for mean in by_image) / 399
    ms_rest = sum(
        (differences[s, i] - by_run[s] - by_image[i] + grand) ** 2 for s in range(3) for i in range(400)
    ) / (2 * 399)
    of_images = max(ms_images - ms_rest, 0.0)
    half = ((4.302653**2 * ms_seeds + 1.959964**2 * of_images) / 1200) ** 0.5
    assert gap.half_width == pytest.approx(100 * half, rel=1e-5)
    assert gap.is_clear
    back = gap_of(theirs, ours)
    assert back.points == pytest.approx(-gap.points)
    assert back.half_width == pytest.approx(gap.half_width)


def test_equal_seeds_are_no_evidence():
    """Means of equal differences may differ by rounding, whose spread is next to nothing."""
    right = np.arange(10) < 7
    ours = [row("ours", seed, right) for seed in range(3)]
    theirs = [row("theirs", seed, right & (np.arange(10) > 0)) for seed in range(3)]
    assert gap_of(ours, theirs).p_seeds is None
    ours, theirs = ([row("x", n, np.arange(10) < least + n) for n in range(3)] for least in (7, 6))
    assert gap_of(ours, theirs).p_seeds is None


def test_seeds_with_equal_gaps_leave_the_interval_of_the_images():
    """Each seed is right on three more of 100 images, which are others each time."""
    right = np.stack([np.arange(100) // 3 == seed for seed in range(3)])
    ours = [row("ours", seed, right[seed]) for seed in range(3)]
    theirs = [row("theirs", seed, np.zeros(100, bool)) for seed in range(3)]
    gap = gap_of(ours, theirs)
    of_images = 1.959964 * (right.mean(axis=0).var(ddof=1) / 100) ** 0.5
    assert (gap.points, gap.half_width) == pytest.approx((3, 100 * of_images), rel=1e-5)


def test_a_row_that_no_seed_changes_is_compared_with_all_seeds_of_another():
    generator = np.random.default_rng(4)
    truth = generator.random((3, 400))
    several = [row("several", seed, truth[seed] < 0.6 + 0.02 * seed) for seed in range(3)]
    once = truth.mean(axis=0) < 0.5
    (fixed,) = ones = [row("fixed", 0, once, fixed=True)]
    gap = gap_of(ones, several)
    same = gap_of([row("fixed", seed, once) for seed in range(3)], several)
    assert gap == same
    assert gap.seeds == 3
    assert gap.points == pytest.approx(100 * (once.mean() - np.mean([row.score for row in several])))
    back = gap_of(several, ones)
    assert (back.points, back.half_width) == pytest.approx((-gap.points, gap.half_width))
    # Two such, of whatever seeds, are one pair.
    other = row("other", 7, truth[0] < 0.6, fixed=True)
    assert gap_of([fixed], [other]).seeds == 1


@pytest.mark.parametrize(("seeds", "spread"), [(3, 0.0), (3, 0.05), (3, 0.2), (5, 0.05)])
def test_the_interval_holds_what_it_says(seeds, spread):
    """Simulated: images differ in difficulty, and seeds differ by `spread`; 95 of 100 intervals hold the truth.

    Without the seeds' part the interval holds 60 % at a spread of 0.2; without the images' part 90 % at 0.
    """
    generator, held, tries, images = np.random.default_rng(1), 0, 400, 300
    points, weights = np.polynomial.hermite_e.hermegauss(40)
    wide = (1 + spread**2) ** 0.5  # a probit averaged over normal seeds
    chances = [stats.norm.cdf((0.3 + slope * points) / wide) @ weights for slope in (2.0, -1.0)]
    truth = 100 * (chances[0] - chances[1]) / weights.sum()
    for _ in range(tries):
        hard = generator.normal(0, 1, images)
        entries = []
        for name, slope in (("one", 2.0), ("other", -1.0)):
            luck = generator.normal(0, spread, (seeds, 1))
            right = generator.random((seeds, images)) < stats.norm.cdf(0.3 + slope * hard + luck)
            entries.append([row(name, seed, right[seed]) for seed in range(seeds)])
        gap = gap_of(*entries)
        held += abs(gap.points - truth) <= gap.half_width
    # 0.95 plus or minus three standard errors of 400 tries is 0.917 to 0.983.
    assert 0.917 <= held / tries <= 0.985


@pytest.mark.parametrize(
    ("images", "ours", "theirs", "text"),
    [
        # An interval is within what a gap can be.
        (40, (39, 30), (0, 10), "(+73.8 [-100.0, 100.0])"),
        (400, (300,), (200,), "+25.0 [20.8, 29.2]*"),
    ],
)
def test_a_gap_says_whether_it_may_be_chance_and_is_of_one_seed(images, ours, theirs, text):
    rows = [[row("x", seed, np.arange(images) < n) for seed, n in enumerate(own)] for own in (ours, theirs)]
    assert gap_of(*rows).in_brackets() == text


def test_no_gap_of_other_images_or_seeds():
    ours, theirs = row("ours", 0, np.ones(4, bool)), row("theirs", 1, np.ones(4, bool))
    assert gap_of([ours], [theirs]) is None
    other = replace(theirs, cell=replace(theirs.cell, seed=0), keys=("a", "b", "c", "e"))
    assert gap_of([ours], [other]) is None
