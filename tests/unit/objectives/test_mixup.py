"""Mixup and cutmix against independent formulas, and against timm's loss of mixed labels."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.stats import beta, kstest
from timm.data.mixup import mixup_target, rand_bbox
from timm.loss import SoftTargetCrossEntropy

from mae_vit.core.batch import Batch
from mae_vit.core.keyed_rng import SampleKeys
from mae_vit.objectives.label_loss import LabelLoss, Mixing

CLASSES = 7


def batch_of(size: int = 64, *, side: tuple[int, int] = (12, 20), epoch: int = 1, first: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (size, 3, *side), dtype=torch.uint8, generator=generator)
    labels = torch.randint(0, CLASSES, (size,), generator=generator)
    # As in an epoch's order: indices in no order.
    index = torch.randperm(20_000, generator=generator)[:size] + first
    return Batch(images, labels, SampleKeys(5, epoch, index))


def part(batch: Batch, start: int, stop: int) -> Batch:
    keys = SampleKeys(batch.keys.seed, batch.keys.epoch, batch.keys.index[start:stop])
    return Batch(batch.images[start:stop], batch.labels[start:stop], keys)


def shares_of(targets: torch.Tensor, labels: torch.Tensor) -> tuple[list[float], list[int]]:
    """What each pair of different labels keeps, and which pairs those are."""
    places = [j for j in range(len(labels) // 2) if labels[2 * j] != labels[2 * j + 1]]
    return [targets[2 * j, labels[2 * j]].item() for j in places], places


def test_mixup_blends_neighbors_and_their_labels():
    batch = batch_of()
    images, targets = Mixing(mixup=0.8, cutmix=0.0)(batch, CLASSES)
    shares, places = shares_of(targets, batch.labels)
    assert len(places) > 20
    for share, j in zip(shares, places, strict=True):
        first, second = batch.images[2 * j].double(), batch.images[2 * j + 1].double()
        torch.testing.assert_close(
            images[2 * j].double(), share * first + (1 - share) * second, atol=1e-3, rtol=0
        )
        torch.testing.assert_close(
            images[2 * j + 1].double(), share * second + (1 - share) * first, atol=1e-3, rtol=0
        )
        assert targets[2 * j + 1, batch.labels[2 * j + 1]].item() == pytest.approx(share)
    torch.testing.assert_close(targets.sum(1), torch.ones(64))


@pytest.mark.parametrize("alpha", [0.2, 1.0, 4.0])
def test_shares_are_of_the_beta_distribution(alpha):
    drawn = [Mixing(mixup=alpha, cutmix=0.0)._draw(batch_of(2000, side=(1, 1), epoch=e))[1] for e in range(4)]
    assert kstest(torch.cat(drawn).double().numpy(), beta(alpha, alpha).cdf).pvalue > 1e-3


def test_cutmix_pastes_a_box_and_labels_by_its_area():
    batch = batch_of(400)
    images, targets = Mixing(mixup=0.0, cutmix=1.0)(batch, CLASSES)
    height, width = batch.images.shape[2:]
    shares, places = shares_of(targets, batch.labels)
    areas = []
    for share, j in zip(shares, places, strict=True):
        first, other, mixed = batch.images[2 * j], batch.images[2 * j + 1], images[2 * j]
        pasted = (mixed != first).any(0)
        rows, columns = pasted.any(1).nonzero().flatten(), pasted.any(0).nonzero().flatten()
        if len(rows):
            box = (slice(None), slice(rows[0], rows[-1] + 1), slice(columns[0], columns[-1] + 1))
            assert torch.equal(mixed[box], other[box].float())
            assert torch.equal(images[2 * j + 1][box], first[box].float())
            area = (rows[-1] + 1 - rows[0]) * (columns[-1] + 1 - columns[0])
        else:
            area = torch.tensor(0)
        assert share == pytest.approx(1 - area.item() / (height * width))
        areas.append(area.item() / (height * width))
    assert min(areas) < 0.03
    assert max(areas) > 0.7


def test_missing_values_stay_in_their_part_of_a_mixture():
    """A pixel is missing in a mixture if it is missing in an image that gives it more than nothing."""
    batch = batch_of(200, side=(8, 8))
    missing = torch.rand(batch.images.shape, generator=torch.Generator().manual_seed(1)) < 0.2
    holed = replace(batch, images=batch.images.float().masked_fill(missing, torch.nan))
    mixing = Mixing(mixup=0.8, cutmix=1.0)
    kept = mixing._draw(batch)[0][:, None, None]  # (P, 1, 1, H, W)
    pairs = missing.unflatten(0, (-1, 2))
    expected = ((pairs & (kept > 0)) | (pairs.flip(1) & (kept < 1))).flatten(0, 1)
    whole, images = mixing(batch, CLASSES)[0], mixing(holed, CLASSES)[0]
    assert torch.equal(images.isnan(), expected)
    assert torch.equal(images[~expected], whole[~expected])


def test_boxes_are_timms():
    """The same size for the same share, and the same mean of what is left after edges cut it off."""
    side = (16, 24)
    np.random.seed(0)
    lam = beta(1.0, 1.0).rvs(4_000, random_state=0)
    theirs = [rand_bbox((1, 3, *side), value) for value in lam]
    expected = 1 - np.array([(b - a) * (d - c) for a, b, c, d in theirs]) / (side[0] * side[1])
    mixing = Mixing(mixup=0.0, cutmix=1.0)
    kept, left = mixing._draw(batch_of(8_000, side=side))
    assert left.double().mean().item() == pytest.approx(expected.mean(), abs=0.03)
    assert left.double().std().item() == pytest.approx(expected.std(), abs=0.03)
    assert kept.sum((1, 2)).div(side[0] * side[1]).tolist() == pytest.approx(left.tolist(), abs=1e-6)


def test_draws_depend_on_sample_and_epoch_alone():
    mixing = Mixing(mixup=0.8, cutmix=1.0)
    batch = batch_of()
    again, later, others = mixing._draw(batch)[1], mixing._draw(batch_of(epoch=2))[1], batch_of(first=77)
    assert torch.equal(mixing._draw(batch)[1], again)
    assert not torch.equal(again, later)
    assert not torch.equal(again, mixing._draw(others)[1])
    # Of the pair, the first sample is the key.
    swapped = SampleKeys(5, 1, torch.where(torch.arange(64) % 2 == 1, 0, batch.keys.index))
    assert torch.equal(mixing._draw(Batch(batch.images, batch.labels, swapped))[1], again)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_of_mixed_labels_is_timms(smoothing):
    torch.manual_seed(0)
    logits, labels, share = torch.randn(6, CLASSES), torch.randint(0, CLASSES, (6,)), 0.3
    theirs = SoftTargetCrossEntropy()(logits, mixup_target(labels, CLASSES, lam=share, smoothing=smoothing))
    # timm pairs the first with the last.
    hot = torch.nn.functional.one_hot(labels, CLASSES).float()
    targets = share * hot + (1 - share) * hot.flip(0)
    ours = LabelLoss(CLASSES, label_smoothing=smoothing).output(logits, targets).loss
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-6)


def test_half_a_pair_is_refused():
    with pytest.raises(ValueError, match=r"micro-batch of 3\b"):
        Mixing(mixup=0.8, cutmix=0.0)(part(batch_of(), 0, 3), CLASSES)


def test_nothing_of_it_is_state():
    assert LabelLoss(CLASSES, mixup=0.8, cutmix=1.0).state_dict() == {}
