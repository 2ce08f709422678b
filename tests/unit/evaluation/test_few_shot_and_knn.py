"""Few-shot and nearest-neighbor scores against independent computations."""

import numpy as np
import pytest
import torch
from sklearn.linear_model import Ridge
from sklearn.preprocessing import StandardScaler

from mae_vit.evaluation import few_shot, knn
from mae_vit.evaluation.few_shot import draw_shots, least_squares_scores
from mae_vit.evaluation.knn import knn_scores


@pytest.mark.parametrize(("images", "width"), [(60, 16), (20, 64)])
@pytest.mark.parametrize("l2", [0.5, 1024.0])
@pytest.mark.parametrize("at_a_time", [1 << 26, 320])
def test_least_squares_is_ridge_regression(images, width, l2, at_a_time, monkeypatch):
    """All at once, and in parts of 20 rows or 5."""
    monkeypatch.setattr(few_shot, "_MAX_NUMBERS", at_a_time)
    rng = np.random.default_rng(0)
    support, query = rng.normal(2, 3, (images, width)), rng.normal(2, 3, (30, width))
    labels = rng.integers(0, 4, images)
    scaler = StandardScaler().fit(support)
    targets = np.where(labels[:, None] == np.arange(4), 1.0, -1.0)
    expected = Ridge(alpha=l2).fit(scaler.transform(support), targets).predict(scaler.transform(query))
    scores = least_squares_scores(
        torch.tensor(support), torch.tensor(labels), torch.tensor(query), num_classes=4, l2=l2
    )
    np.testing.assert_allclose(scores.numpy(), expected, atol=1e-8)


def test_a_constant_feature_does_no_harm():
    support = torch.tensor([[1.0, 5.0], [-1.0, 5.0]])
    scores = least_squares_scores(support, torch.tensor([0, 1]), support, num_classes=2, l2=0.1)
    assert scores.argmax(-1).tolist() == [0, 1]
    assert torch.isfinite(scores).all()


@pytest.mark.parametrize("at_a_time", [1 << 26, 120])
def test_nearest_neighbors_by_brute_force(at_a_time, monkeypatch):
    monkeypatch.setattr(knn, "_MAX_SIMILARITIES", at_a_time)
    torch.manual_seed(0)
    support, query, labels = torch.randn(40, 8), torch.randn(10, 8), torch.randint(0, 3, (40,))
    scores = knn_scores(support, labels, query, num_classes=3, neighbors=7, temperature=0.1)
    for number in range(10):
        near = sorted(
            (
                (torch.cosine_similarity(query[number], other, dim=0).item(), place)
                for place, other in enumerate(support)
            ),
            reverse=True,
        )[:7]
        expected = [0.0, 0.0, 0.0]
        for similarity, place in near:
            expected[int(labels[place])] += np.exp(similarity / 0.1)
        assert scores[number].tolist() == pytest.approx(expected, rel=1e-4)
    assert knn_scores(support, labels, query, num_classes=3, neighbors=99).shape == (10, 3)


def test_draws_are_balanced_disjoint_and_keyed():
    labels = np.repeat([0, 1, 2, -1], [50, 30, 3, 20])
    support, queries = draw_shots(labels, shots=5, queries=40)
    assert np.bincount(labels[support]).tolist() == [5, 5, 1]  # half of three, rounded down
    assert len(queries) == 40
    assert not set(support) & set(queries)
    assert (labels[queries] >= 0).all()
    again, _ = draw_shots(labels, shots=5, queries=7)
    assert np.array_equal(support, again)
    other, _ = draw_shots(labels, shots=5, queries=7, draw=1)
    assert not np.array_equal(support, other)
    nothing, rest = draw_shots(np.full(9, -1), shots=5, queries=4)
    assert len(nothing) == len(rest) == 0
