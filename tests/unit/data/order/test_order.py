"""The one idea: nothing random depends on who computes it."""

import hashlib
import math

import numpy as np
import pytest
from helpers.batch_digests import digest_of_global_batches, order_of

from mae_vit.core.keyed_rng import RngStream, derive_key, threefry2x32
from mae_vit.data.batches.loader import start_worker_server
from mae_vit.data.order.order import GlobalOrder, RankSlice, data_step, micro_batches
from mae_vit.data.order.permutation import permute

BATCH = 96
SKIPPED = ((1, 2), (40, 43))


def permutations(num_samples, draws):
    """Of as many keys, computed at once: (draws, num_samples)."""
    keys = threefry2x32((1, 2), np.arange(draws, dtype=np.uint32), np.zeros(draws, np.uint32))
    k0, k1 = (np.repeat(words, num_samples) for words in keys)
    domains = np.full(draws * num_samples, num_samples)
    orders = permute(np.tile(np.arange(num_samples), draws), domains, (k0, k1))
    return orders.reshape(draws, num_samples)


@pytest.mark.parametrize("num_samples", [60, 64])  # the last of the tiny, the first of the usual
def test_permutation_looks_random(num_samples):
    """Where sample 0 lands, and which pairs follow each other, over many keys."""
    orders = permutations(num_samples, 100 * num_samples)
    places = np.bincount(orders.argmin(axis=1), minlength=num_samples)
    follows = np.bincount((orders[:, 1] - orders[:, 0]) % num_samples, minlength=num_samples)
    # 100 each, standard deviation 10.
    assert abs(places - 100).max() < 50
    assert follows[0] == 0
    assert abs(follows[1:] - 100).max() < 50


@pytest.mark.parametrize("num_samples", [5, 6])
def test_tiny_permutations_are_all_equally_likely(num_samples):
    orders = permutations(num_samples, 200 * math.factorial(num_samples))
    _, counts = np.unique(orders @ num_samples ** np.arange(num_samples), return_counts=True)
    assert len(counts) == math.factorial(num_samples)
    chi2 = ((counts - 200) ** 2 / 200).sum() / (len(counts) - 1)
    assert abs(chi2 - 1) < 5 * math.sqrt(2 / (len(counts) - 1))


# The first 1534 places, as of the first release: runs that were begun go on in their order.
KEPT = {64: "ff52f0c4771c7fde", 1534: "a90772781df5071c", 10**9: "c2c4a9bb82dc9022"}


@pytest.mark.parametrize("num_samples", KEPT)
def test_the_order_stays_what_it_was(num_samples):
    order = permute(np.arange(min(num_samples, 1534)), num_samples, derive_key(0, RngStream.ORDER, 0))
    assert hashlib.sha256(order.astype("<i8").tobytes()).hexdigest()[:16] == KEPT[num_samples]


def test_domains_side_by_side_are_those_of_a_call_for_each():
    """Sizes that walk, that are squares, that are tiny, of several keys."""
    sizes = [1, 2, 5, 63, 64, 97, 1000, 65536]
    positions = [np.arange(min(size, 300)) for size in sizes]
    keys = [derive_key(7, RngStream.ORDER, epoch) for epoch in range(len(sizes))]
    lengths = [len(places) for places in positions]
    k0, k1 = (np.repeat(np.array(words, np.uint32), lengths) for words in zip(*keys, strict=True))
    together = permute(np.concatenate(positions), np.repeat(sizes, lengths), (k0, k1))
    apart = [permute(*call) for call in zip(positions, sizes, keys, strict=True)]
    np.testing.assert_array_equal(together, np.concatenate(apart))


def test_permutation_refuses_nothing_and_too_much():
    for num_samples in (0, 2**32 + 1):
        with pytest.raises(ValueError, match="samples"):
            permute(np.arange(1), num_samples, (0, 0))
    with pytest.raises(ValueError, match="samples"):
        permute(np.arange(2), np.array([5, 0]), (0, 0))


def test_epochs_differ_and_each_holds_every_sample_once():
    order = GlobalOrder(1534, BATCH, seed=0)
    epochs = []
    for epoch in (0, 1):
        start = epoch * order.steps_per_epoch
        steps = micro_batches(order, RankSlice(), start_step=start, stop_step=start + order.steps_per_epoch)
        samples = np.concatenate([samples for number, samples in steps if number == epoch])
        assert len(samples) == 1534 // BATCH * BATCH
        assert len(set(samples.tolist())) == len(samples)
        epochs.append(samples)
    assert (epochs[0] == epochs[1]).mean() < 0.01
    assert set(epochs[0].tolist()) != set(epochs[1].tolist())  # another remainder is dropped


# Many steps of a call, two, less than one.
@pytest.mark.parametrize(("batch", "skipped"), [(96, SKIPPED), (96, ()), (1536, SKIPPED), (4608, SKIPPED)])
def test_each_step_is_its_slice_of_the_order_wherever_one_begins(batch, skipped):
    order = GlobalOrder(10_000, batch, seed=3)
    stop = 2 * order.steps_per_epoch
    for share in (RankSlice(), RankSlice(1, 4, 2)):
        batches = list(micro_batches(order, share, start_step=0, stop_step=stop, skipped=skipped))
        for step in range(stop):
            epoch, place = divmod(data_step(step, skipped), order.steps_per_epoch)
            whole = order.samples(epoch, place * batch, (place + 1) * batch)
            mine = whole.reshape(share.world_size, -1)[share.rank].reshape(share.accumulation, -1)
            parts = batches[step * share.accumulation : (step + 1) * share.accumulation]
            assert {number for number, _ in parts} == {epoch}
            np.testing.assert_array_equal(np.stack([part for _, part in parts]), mine)
        for start in (1, stop // 2):
            later = micro_batches(order, share, start_step=start, stop_step=stop, skipped=skipped)
            for one, other in zip(later, batches[start * share.accumulation :], strict=True):
                np.testing.assert_array_equal(one[1], other[1])


@pytest.mark.parametrize("mode", ["global", "blocks"])
@pytest.mark.parametrize("repeats", [1, 4])
def test_global_batches_do_not_depend_on_ranks_or_workers(many_shards, mode, repeats):
    start_worker_server()
    order, steps = order_of(many_shards, mode, repeats), range(12, 19)
    assert steps.start < order.steps_per_epoch < steps.stop
    expected = digest_of_global_batches(many_shards, order, "tar", 1, 0, steps)
    assert len(set(expected)) == len(expected)
    # Of 16 ranks, two share each lane; a micro-batch has all views of an image.
    ranks = 16 if repeats == 1 else 8
    for world_size, name, workers, accumulation in (
        (ranks, "tar", 0, 1),
        (2, "tar", 2, 1),
        (2, "memory", 0, 3),
    ):
        digest = digest_of_global_batches(many_shards, order, name, world_size, workers, steps, accumulation)
        assert digest == expected, world_size
    # From the middle of an epoch on: no state to restore.
    again = order_of(many_shards, mode, repeats)
    assert digest_of_global_batches(many_shards, again, "memory", 4, 0, range(15, 19)) == expected[3:]
