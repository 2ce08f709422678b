"""Accuracy, confusion, calibration and intersection over union against scikit-learn."""

import numpy as np
import pytest
import torch
from scipy.stats import binomtest
from sklearn.calibration import calibration_curve
from sklearn.metrics import (
    accuracy_score,
    confusion_matrix,
    jaccard_score,
    recall_score,
    top_k_accuracy_score,
)

from mae_vit.evaluation.metrics import Predictions, interpret_gap, interval_of_share
from mae_vit.evaluation.segmentation import Overlaps, count_overlaps, mean_iou


@pytest.fixture
def chances():
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 7, 500)
    logits = rng.normal(0, 1.5, (500, 7)) + 1.2 * np.eye(7)[labels]
    chances = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    order = np.argsort(-chances, axis=1)
    in_top5 = (order[:, :5] == labels[:, None]).any(axis=1)
    return labels, chances, Predictions(labels, order[:, 0], chances.max(axis=1), in_top5)


def test_against_scikit_learn(chances):
    labels, table, predictions = chances
    assert predictions.top1 == pytest.approx(accuracy_score(labels, predictions.classes))
    assert predictions.top5 == pytest.approx(top_k_accuracy_score(labels, table, k=5))
    assert np.array_equal(
        predictions.confusion(7), confusion_matrix(labels, predictions.classes, labels=range(7))
    )
    np.testing.assert_allclose(
        predictions.per_class(7), recall_score(labels, predictions.classes, average=None)
    )


def test_calibration_against_scikit_learn(chances):
    _, _, predictions = chances
    right = predictions.labels == predictions.classes
    accuracy, confidence = calibration_curve(right, predictions.confidences, n_bins=15)
    counts = np.histogram(predictions.confidences, np.linspace(0, 1, 16))[0]
    expected = (counts[counts > 0] / len(right) * np.abs(accuracy - confidence)).sum()
    assert predictions.calibration_error == pytest.approx(expected)
    assert 0.01 < expected < 0.5


def test_calibration_by_hand():
    # Half of the sure ones are wrong; the unsure one is right.
    predictions = Predictions(
        np.array([0, 1, 0]), np.array([0, 0, 0]), np.array([1.0, 1.0, 0.4]), np.ones(3, bool)
    )
    assert predictions.calibration_error == pytest.approx((2 * 0.5 + 0.6) / 3)


def test_a_class_without_images_has_no_accuracy():
    predictions = Predictions(np.array([0, 2]), np.array([0, 1]), np.array([0.9, 0.8]), np.ones(2, bool))
    assert predictions.per_class(4) == [1.0, None, 0.0, None]


def test_the_gap_is_read():
    assert "over-fitting" in interpret_gap(0.95, 0.70)
    assert "not yet high" in interpret_gap(0.70, 0.40)
    assert "under-fitting or too few steps" in interpret_gap(0.53, 0.49)
    assert "no strong" in interpret_gap(0.93, 0.91)
    assert "gap -2.0 points" in interpret_gap(0.50, 0.52)


def test_classes_that_training_lacks_are_no_over_fitting():
    said = interpret_gap(0.95, 0.50, unknown=0.5)
    assert "50.0%" in said
    assert "over-fitting" not in said


@pytest.mark.parametrize(("right", "images"), [(37, 150), (0, 10), (10, 10), (5000, 10000)])
def test_the_interval_of_an_accuracy_is_wilsons(right, images):
    known = binomtest(right, images).proportion_ci(method="wilson")
    assert interval_of_share(right / images, images) == pytest.approx((known.low, known.high), abs=1e-6)


K = 6


def random_maps(seed=0, images=5):
    rng = np.random.default_rng(seed)
    truth = rng.integers(-1, K - 1, (images, 12, 10))  # the last class is nowhere
    guess = np.where(rng.random(truth.shape) < 0.6, truth.clip(0), rng.integers(0, K - 1, truth.shape))
    return truth, guess


def overlaps(truth, guess) -> Overlaps:
    both, either = count_overlaps(torch.from_numpy(guess), torch.from_numpy(truth), K)
    return Overlaps(both.numpy(), either.numpy())


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
