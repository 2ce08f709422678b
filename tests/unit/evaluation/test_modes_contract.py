"""What every mode on frozen features promises that uses all labels; a new one is tested without new tests."""

from typing import get_args

import pytest
import torch

from mae_vit.finetuning.config.modes import MODES, ModeName
from mae_vit.finetuning.config.schema import FinetuneSection
from mae_vit.finetuning.frozen.closed_form import WITH_ALL_LABELS

CLASSES, WIDTH = 4, 16


@pytest.fixture(params=WITH_ALL_LABELS)
def scores(request):
    """A mode's scores of queries (m, D), from 60 images of three classes; the fourth class has none."""
    score, options = WITH_ALL_LABELS[request.param](FinetuneSection(mode=request.param))
    support, labels = clusters(60, seed=0)
    return lambda query: score(support, labels, query, num_classes=CLASSES, **options)


def clusters(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % (CLASSES - 1)
    return 5 * torch.eye(WIDTH)[labels] + torch.randn(count, WIDTH, generator=generator), labels


def test_the_config_takes_every_mode_and_refuses_its_options_elsewhere():
    assert {"few_shot", *WITH_ALL_LABELS} == {
        name for name, mode in MODES.items() if mode.trains == "nothing"
    }
    assert set(MODES) == set(get_args(ModeName))
    assert {key for mode in MODES.values() for key in mode.options} <= set(FinetuneSection.model_fields)


def test_options_of_a_mode_are_those_that_the_config_calls_its_own():
    for mode, named in WITH_ALL_LABELS.items():
        assert set(named(FinetuneSection(mode=mode))[1]) == set(MODES[mode].options)


def test_scores_become_probabilities_and_find_the_cluster(scores):
    query, labels = clusters(30, seed=1)
    values = scores(query)
    assert values.shape == (30, CLASSES)
    assert torch.isfinite(values).all()
    assert values.min() >= 0
    assert values.sum(dim=1).min() > 0
    assert (values.argmax(dim=1) == labels).float().mean() > 0.9


def test_a_score_depends_on_its_query_alone(scores):
    """Ranks share the queries."""
    query, _ = clusters(30, seed=1)
    torch.testing.assert_close(scores(query[1::2]), scores(query)[1::2])
