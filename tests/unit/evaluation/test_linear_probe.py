"""Edges of the linear probe; tests/runs/finetune/frozen/test_linear_probe.py compares it with a plain loop."""

import numpy as np
import torch
from torch import nn

from mae_vit.finetuning.frozen.linear_probe import LinearProbe, probe_top1, train_probe

D, K = 5, 3


def test_a_probe_begins_with_a_copy_of_the_head():
    head = nn.Linear(D, K)
    before = head.weight.detach().clone()
    probe = LinearProbe(head)
    assert torch.equal(probe.head.weight, before)
    features, labels = torch.randn(6, D), torch.arange(6) % K
    train_probe(probe, features, labels, [(0.1, np.arange(6))], torch.optim.SGD(probe.parameters(), lr=0.1))
    assert torch.equal(head.weight, before)
    assert not torch.equal(probe.head.weight, before)


def test_a_rate_too_large_has_no_score():
    probe = LinearProbe(nn.Linear(D, K)).eval()
    features, labels = torch.ones(4, D), torch.zeros(4, dtype=torch.int64)
    assert probe_top1(probe, features, labels) is not None
    with torch.no_grad():
        probe.head.weight[0, 0] = float("inf")
    assert probe_top1(probe, features, labels) is None
