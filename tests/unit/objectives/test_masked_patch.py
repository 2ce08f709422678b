"""Masked patch prediction: what is replaced by what, and what the loss sees."""

import math

import pytest
import torch
from helpers.objectives import batch_of, build

from mae_vit.core.batch import Batch
from mae_vit.models.masking import KIND_MASK, KIND_RANDOM


def test_embeddings_are_replaced_as_drawn():
    objective = build("masked_patch", "tiny")
    batch = batch_of(objective)
    _, drawn = objective.predict(batch)
    tokens = torch.randn(8, 16, 32)
    replaced = objective.replace(tokens, drawn)
    kinds = set()
    for sample in range(8):
        corrupted = drawn.ids[sample].tolist()
        for patch in range(16):
            expected = tokens[sample, patch]
            if patch in corrupted:
                place = corrupted.index(patch)
                kind = int(drawn.kind[sample, place])
                kinds.add(kind)
                if kind == KIND_MASK:
                    expected = objective.mask_token[0, 0]
                elif kind == KIND_RANDOM:
                    expected = tokens[sample, drawn.source[sample, place]]
            assert torch.equal(replaced[sample, patch], expected)
    assert len(kinds) == 3


def test_accuracy_counts_mask_positions_alone():
    objective = build("masked_patch", "tiny").eval()
    images = torch.full((8, 3, 16, 16), 130, dtype=torch.uint8)  # every patch: 64*4 + 8*4 + 4
    batch = Batch(images, torch.zeros(8).long(), batch_of(objective).keys)
    with torch.no_grad():
        objective.head.weight.zero_()
        objective.head.bias.copy_(torch.arange(512) == 292)
        sums = {name: float(value) for name, value in objective.evaluation_sums(batch).items()}
        output = objective(batch)
    _, drawn = objective.predict(batch)
    assert sums["on_mask"] == (drawn.kind == KIND_MASK).sum()
    metrics = objective.evaluation_metrics(sums)
    assert metrics["accuracy_on_mask"] == metrics["accuracy_nearest_visible"] == 1
    hits, positions = output.values["accuracy_on_mask"]
    assert hits == positions > 0
    assert metrics["loss"] == pytest.approx(math.log(511 + math.e) - 1, rel=1e-5)
