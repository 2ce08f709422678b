"""RankMe and the spread of features, by the papers' formulas written out."""

import math

import numpy as np
import pytest
import torch

from mae_vit.evaluation.feature_rank import feature_metrics, feature_sums


def by_hand(features: np.ndarray) -> tuple[float, float]:
    """RankMe Eq. 1 from an SVD, and SimSiam's standard deviation, in loops."""
    singular = np.linalg.svd(features, compute_uv=False)
    entropy = 0.0
    for value in singular:
        share = value / singular.sum() + 1e-7
        entropy -= share * math.log(share)
    lengths = [row / math.sqrt(sum(value * value for value in row)) for row in features]
    spreads = [np.std([row[place] for row in lengths]) for place in range(features.shape[1])]
    return math.exp(entropy), float(np.mean(spreads)) * math.sqrt(features.shape[1])


@pytest.mark.parametrize("shape", [(40, 8), (5, 8), (8, 8)])
@pytest.mark.parametrize("offset", [0.0, 3.0])
def test_both_are_the_papers(shape, offset):
    rows = np.random.default_rng(0).normal(size=shape) * np.linspace(0.01, 2, shape[1]) + offset
    rank, spread = by_hand(rows)
    measured = feature_metrics(feature_sums(torch.from_numpy(rows).float()), shape[1])
    assert measured["rankme"] == pytest.approx(rank, rel=1e-4)
    assert measured["feature_std"] == pytest.approx(spread, rel=1e-4)
    assert 1 < rank < min(shape)


def test_a_collapse_shows():
    same = torch.randn(1, 8, generator=torch.Generator().manual_seed(0)).expand(20, -1)
    measured = feature_metrics(feature_sums(same), 8)
    assert measured["rankme"] == pytest.approx(1, abs=1e-4)
    assert measured["feature_std"] == pytest.approx(0, abs=1e-6)


def test_parts_add_up():
    rows = torch.randn(30, 8, generator=torch.Generator().manual_seed(0))
    parts = feature_sums(rows[:11]) + feature_sums(rows[11:])
    whole = feature_metrics(feature_sums(rows), 8)
    assert feature_metrics(parts, 8) == pytest.approx(whole, rel=1e-9)


def test_features_that_are_not_finite_have_no_rank():
    rows = torch.zeros(4, 2)
    assert math.isfinite(feature_metrics(feature_sums(rows), 2)["rankme"])
    rows[1, 1] = math.nan
    assert all(math.isnan(value) for value in feature_metrics(feature_sums(rows), 2).values())
