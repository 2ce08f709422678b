"""Repeated augmentation: several views of an image that is decoded once."""

import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers.batch_digests import open_digits, order_of
from helpers.damage import WAYS, copy_of, damage

from mae_vit.core.errors import InputError
from mae_vit.data.batches import sources as reading
from mae_vit.data.batches.loader import load_batches, replacement_candidates
from mae_vit.data.index import open_index
from mae_vit.data.order.order import GlobalOrder, RankSlice, RepeatedOrder, view_keys

REPEATS, BATCH = 4, 96


@pytest.mark.parametrize("mode", ["global", "blocks"])
def test_all_samples_come_once_in_as_many_epochs_as_repeats(many_shards, mode):
    order, plain = order_of(many_shards, mode, REPEATS), order_of(many_shards, mode)
    assert (order.effective_batch_size, order.seed) == (BATCH, 7)
    assert order.steps_per_epoch == plain.steps_per_epoch
    length = order.steps_per_epoch * BATCH
    epochs = [order.samples(epoch, 0, length) for epoch in range(2 * REPEATS)]
    for samples in epochs:
        rows = samples.reshape(-1, REPEATS)
        assert (rows == rows[:, :1]).all()
    passes = [np.concatenate(epochs[:REPEATS])[::REPEATS], np.concatenate(epochs[REPEATS:])[::REPEATS]]
    for once in passes:
        assert len(set(once.tolist())) == len(once) == length
    assert (passes[0] != passes[1]).any()


def test_any_slice_is_one_of_the_epoch():
    order = RepeatedOrder(GlobalOrder(1497, 24, 7), REPEATS)
    whole = order.samples(2, 0, order.steps_per_epoch * BATCH)
    for start, stop in [(0, 0), (0, 5), (3, 4), (7, 96), (95, 300), (1001, 1002)]:
        np.testing.assert_array_equal(order.samples(2, start, stop), whole[start:stop])


@pytest.mark.parametrize("name", ["memory", "tar"])
def test_views_are_those_of_their_numbers(digits, name):
    """By hand: each view cut out of the decoded image, keyed by r * sample + k."""
    index = open_index(digits, "train")
    source = open_digits(index, name)
    samples = np.repeat([41, 3, 900], REPEATS)
    images = source.render(7, 2, samples, view_keys(samples, REPEATS)).images
    for place, sample in enumerate(samples):
        key = np.array([REPEATS * sample + place % REPEATS])
        decoded = reading.decode_sample(index, int(sample), 1)
        view = source.augment.apply([decoded], source.augment.draw(7, 2, key))[0]
        np.testing.assert_array_equal(images[place], view)
    assert len(np.unique(images[:REPEATS], axis=0)) == REPEATS
    part = replace(source, samples=np.array([3, 41, 900]))
    places = np.repeat([1, 0, 2], REPEATS)
    np.testing.assert_array_equal(part.render(7, 2, places, view_keys(samples, REPEATS)).images, images)


def test_an_image_is_decoded_once_and_each_view_has_its_mask(digits, monkeypatch):
    decoded = []
    monkeypatch.setattr(
        reading,
        "decode",
        lambda data, *how, real=reading.decode, **more: decoded.append(data) or real(data, *how, **more),
    )
    order = order_of(digits, "global", REPEATS)
    source = open_digits(open_index(digits, "train"), "tar")
    batches = list(load_batches(source, order, RankSlice(), start_step=0, stop_step=2))
    assert len(decoded) == 2 * BATCH // REPEATS
    for step, batch in enumerate(batches):
        samples = order.samples(0, step * BATCH, (step + 1) * BATCH)
        assert torch.equal(batch.keys.index, torch.from_numpy(view_keys(samples, REPEATS)))
        assert len(batch.keys.index.unique()) == BATCH
        np.testing.assert_array_equal(batch.labels, source.labels[samples])


@pytest.mark.parametrize("name", ["memory", "tar"])
def test_all_views_of_a_damaged_sample_are_of_one_that_stands_in(many_shards, tmp_path, name):
    order, copy = order_of(many_shards, "global", REPEATS), copy_of(many_shards, tmp_path / "data")
    samples = order.samples(0, 0, BATCH)
    bad = [int(samples[0]), int(samples[8]), int(samples[-1])]
    damage(many_shards, copy, dict(zip(bad, WAYS, strict=False)))
    source = open_digits(open_index(copy, "train"), name)
    whole = open_digits(open_index(many_shards, "train"), name)
    (batch,) = load_batches(source, order, RankSlice(), start_step=0, stop_step=1)
    assert {damage.sample for damage in batch.damaged} >= set(bad)
    passed = {damage.sample for damage in batch.damaged}
    taken = np.array(
        [next(n for n in replacement_candidates(int(s), 1497) if n not in passed) for s in samples]
    )
    assert (taken != samples).sum() == 3 * REPEATS
    np.testing.assert_array_equal(batch.images, whole.render(7, 0, taken, view_keys(taken, REPEATS)).images)
    # Masks are those of the order.
    assert torch.equal(batch.keys.index, torch.from_numpy(view_keys(samples, REPEATS)))


def test_more_views_than_numbers_are_refused(digits):
    with pytest.raises(InputError, match=re.escape("2**32 views")):
        order_of(digits, "global", 2**22, batch=2**30)
