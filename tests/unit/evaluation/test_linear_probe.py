"""The linear probe against gradients by hand, and its edges."""

import numpy as np
import pytest
import torch
from torch import nn

from mae_vit.finetuning.frozen.linear_probe import LinearProbe, probe_top1, train_probe

N, D, K, BATCH, STEPS = 60, 5, 3, 12, 40


@pytest.fixture
def problem():
    rng = np.random.default_rng(0)
    features, labels = rng.normal(3, 2, (N, D)), rng.integers(0, K, N)
    steps = [(0.2 * (1 - n / STEPS), rng.choice(N, BATCH, replace=False)) for n in range(STEPS)]
    return features, labels, steps


def by_hand(features, labels, steps, momentum, smoothing):
    """BatchNorm without affine, softmax regression and SGD with momentum, in NumPy alone."""
    weight, bias = np.zeros((K, D)), np.zeros(K)
    speed_w, speed_b = np.zeros((K, D)), np.zeros(K)
    mean, var = np.zeros(D), np.ones(D)
    for rate, places in steps:
        x, y = features[places], labels[places]
        z = (x - x.mean(0)) / np.sqrt(x.var(0) + 1e-6)
        mean, var = 0.9 * mean + 0.1 * x.mean(0), 0.9 * var + 0.1 * x.var(0, ddof=1)
        scores = np.exp(z @ weight.T + bias)
        targets = np.full((BATCH, K), smoothing / K)
        targets[np.arange(BATCH), y] += 1 - smoothing
        error = (scores / scores.sum(1, keepdims=True) - targets) / BATCH
        speed_w, speed_b = momentum * speed_w + error.T @ z, momentum * speed_b + error.sum(0)
        weight, bias = weight - rate * speed_w, bias - rate * speed_b
    return weight, bias, mean, var


@pytest.mark.parametrize(("momentum", "smoothing"), [(0.0, 0.0), (0.9, 0.0), (0.9, 0.2)])
def test_training_is_that_by_hand(problem, momentum, smoothing):
    features, labels, steps = problem
    head = nn.Linear(D, K)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    probe = LinearProbe(head).double()
    optimizer = torch.optim.SGD(probe.parameters(), lr=9.0, momentum=momentum)
    given = torch.from_numpy(features), torch.from_numpy(labels)
    train_probe(probe, *given, steps, optimizer, label_smoothing=smoothing)
    weight, bias, mean, var = by_hand(features, labels, steps, momentum, smoothing)
    assert np.abs(weight).max() > 0.1
    for trained, expected in (
        (probe.head.weight, weight),
        (probe.head.bias, bias),
        (probe.norm.running_mean, mean),
        (probe.norm.running_var, var),
    ):
        np.testing.assert_allclose(trained.detach().numpy(), expected, atol=1e-10)
    logits = (features - mean) / np.sqrt(var + 1e-6) @ weight.T + bias
    assert not probe.training
    assert probe_top1(probe, *given) == pytest.approx((logits.argmax(1) == labels).mean())
    folded_weight, folded_bias = (tensor.numpy() for tensor in probe.folded())
    np.testing.assert_allclose(features @ folded_weight.T + folded_bias, logits, atol=1e-4)


def test_a_probe_begins_with_a_copy_of_the_head(problem):
    features, labels, steps = problem
    head = nn.Linear(D, K)
    before = head.weight.detach().clone()
    probe = LinearProbe(head)
    assert torch.equal(probe.head.weight, before)
    given = torch.from_numpy(features).float(), torch.from_numpy(labels)
    train_probe(probe, *given, steps, torch.optim.SGD(probe.parameters(), lr=0.1))
    assert torch.equal(head.weight, before)
    assert not torch.equal(probe.head.weight, before)


def test_a_rate_too_large_has_no_score():
    probe = LinearProbe(nn.Linear(D, K)).eval()
    features, labels = torch.ones(4, D), torch.zeros(4, dtype=torch.int64)
    assert probe_top1(probe, features, labels) is not None
    with torch.no_grad():
        probe.head.weight[0, 0] = float("inf")
    assert probe_top1(probe, features, labels) is None
