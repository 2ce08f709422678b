"""What every objective promises; a new line in the dictionary is tested without new tests."""

import math

import pytest
import torch
from helpers.objectives import ENCODERS, VARIANTS, batch_of, build, section_of, takes, unit_of

from mae_vit.core.batch import Batch
from mae_vit.core.keyed_rng import SampleKeys
from mae_vit.objectives import OBJECTIVES
from mae_vit.objectives.objective import Objective
from mae_vit.objectives.supervised import Supervised

# Every objective with every encoder that it takes; each variant with another one.
PAIRS = [(name, encoder) for name in OBJECTIVES for encoder in ENCODERS if takes(name, encoder)]
for number, variant in enumerate(VARIANTS):
    able = [encoder for encoder in ENCODERS if takes(variant, encoder)]
    PAIRS.append((variant, able[number % len(able)]))


@pytest.fixture(params=PAIRS, ids=": ".join)
def objective(request) -> Objective:
    return build(*request.param)


def test_loss_is_finite_and_every_trainable_parameter_learns(objective):
    for _ in range(2):
        output = objective(batch_of(objective))
        assert output.loss.ndim == 0
        assert output.loss.dtype == torch.float32
        assert torch.isfinite(output.loss)
        output.loss.backward()
        for name, parameter in objective.named_parameters():
            assert not parameter.requires_grad or parameter.grad is not None, name
    for name, parameter in objective.named_parameters():
        if parameter.requires_grad:
            assert torch.isfinite(parameter.grad).all(), name
            assert parameter.grad.abs().sum() > 0, name
    for total, count in output.values.values():
        assert torch.isfinite(total)
        assert count > 0
        assert not total.requires_grad


def test_same_keys_same_loss_other_keys_another(objective):
    batch = batch_of(objective)
    assert objective(batch).loss == objective(batch).loss
    other = Batch(batch.images, batch.labels, SampleKeys(3, 2, batch.keys.index))
    # Labels are no draw; what is mixed is.
    plain = isinstance(objective, Supervised) and objective.labels.mixing is None
    assert (objective(batch).loss == objective(other).loss) == plain


def test_mean_over_any_split_is_the_mean_over_the_batch(objective):
    objective.eval()  # batch norms see the batch in training, by design
    whole = objective(batch_of(objective)).loss
    for parts in ([(0, 4), (4, 8)], [(0, 2), (2, 4), (4, 6), (6, 8)]):
        if any((stop - start) % unit_of(objective) for start, stop in parts):
            continue
        mean = sum(objective(batch_of(objective, *part)).loss for part in parts) / len(parts)
        assert mean.item() == pytest.approx(whole.item(), rel=1e-6)


def test_state_round_trip(objective):
    expected = objective(batch_of(objective)).loss
    state = {name: value.clone() for name, value in objective.state_dict().items()}
    with torch.no_grad():
        for parameter in objective.parameters():
            parameter.add_(1.0)
    assert objective(batch_of(objective)).loss != expected
    objective.load_state_dict(state, strict=True)
    assert objective(batch_of(objective)).loss == expected


def test_evaluation_adds_up_over_batches(objective):
    objective.eval()
    with torch.no_grad():
        whole = objective.evaluation_sums(batch_of(objective))
        cut = 4 if unit_of(objective) > 1 else 3  # whole groups of images
        parts = [objective.evaluation_sums(batch_of(objective, *part)) for part in ((0, cut), (cut, 8))]
    for name, value in whole.items():
        assert float(parts[0][name] + parts[1][name]) == pytest.approx(float(value), rel=1e-5), name
    metrics = objective.evaluation_metrics({name: float(value) for name, value in whole.items()})
    assert "loss" in metrics
    assert all(math.isfinite(value) for value in metrics.values())


def test_pictures_are_labeled_rows(objective):
    with torch.no_grad():
        rows = objective.pictures(batch_of(objective))
    assert len({row.label for row in rows}) == len(rows)
    if objective.hidden_ratio:
        assert [row.label.split(": ")[-1].split(" ")[0] for row in rows[:3]] == [
            "masked",
            "predicted",
            "pasted",
        ]
    assert rows[-1].label == "original"
    for row in rows:
        assert row.images.shape == batch_of(objective).images.shape
        assert 0 <= row.images.min() <= row.images.max() <= 1
    torch.testing.assert_close(rows[-1].images, batch_of(objective).images.float() / 255)


@pytest.mark.parametrize("name", ["mae", "contrastive_mae", "masked_patch", "joint", "supervised"])
def test_what_an_encoder_cannot_do_is_said(name):
    with pytest.raises(ValueError, match=r"SmallResNet.*(simmim|pool=mean)"):
        OBJECTIVES[name].model_validate({"name": name}).check_encoder(section_of("convolutions"))
