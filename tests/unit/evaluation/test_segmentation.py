"""Intersection over union against scikit-learn's."""

import numpy as np
import pytest
import torch
from sklearn.metrics import accuracy_score, confusion_matrix, jaccard_score

from mae_vit.evaluation.segmentation import Overlaps, count_overlaps, mean_iou

K = 6


def random_maps(seed=0, images=5):
    rng = np.random.default_rng(seed)
    truth = rng.integers(-1, K - 1, (images, 12, 10))  # the last class is nowhere
    guess = np.where(rng.random(truth.shape) < 0.6, truth.clip(0), rng.integers(0, K - 1, truth.shape))
    return truth, guess


def overlaps(truth, guess) -> Overlaps:
    both, either = count_overlaps(torch.from_numpy(guess), torch.from_numpy(truth), K)
    return Overlaps(both.numpy(), either.numpy(), (truth >= 0).sum(axis=(1, 2)).astype(float))


def test_mean_iou_is_scikit_learns():
    truth, guess = random_maps()
    found = overlaps(truth, guess)
    counted = truth >= 0
    # Over the classes that are there, or predicted: jaccard_score's labels by default.
    assert found.miou == pytest.approx(
        jaccard_score(truth[counted], guess[counted], average="macro"), abs=1e-12
    )
    table = confusion_matrix(truth[counted], guess[counted], labels=range(K))
    hits, union = np.diag(table), table.sum(axis=0) + table.sum(axis=1) - np.diag(table)
    assert found.per_class()[:-1] == pytest.approx(list(hits[:-1] / union[:-1]), abs=1e-12)
    assert found.per_class()[-1] is None
    assert found.pixel_accuracy == pytest.approx(accuracy_score(truth[counted], guess[counted]), abs=1e-12)


def test_images_have_scores_of_their_own():
    truth, guess = random_maps(1)
    found = overlaps(truth, guess)
    for number in range(len(truth)):
        counted = truth[number] >= 0
        expected = jaccard_score(truth[number][counted], guess[number][counted], average="macro")
        assert found.miou_by_image[number] == pytest.approx(expected, abs=1e-12)
        share = accuracy_score(truth[number][counted], guess[number][counted])
        assert found.pixel_accuracy_by_image[number] == pytest.approx(share, abs=1e-12)


def test_the_edges_by_hand():
    assert mean_iou(np.array([0.0, 0.0]), np.array([0.0, 0.0])) == 1
    assert mean_iou(np.array([2.0, 0.0, 0.0]), np.array([4.0, 1.0, 0.0])) == pytest.approx(0.25)
