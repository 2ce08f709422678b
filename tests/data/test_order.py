"""The one idea: nothing random depends on who computes it."""

import hashlib

import numpy as np
import pytest
import torch

from mae_vit.data.augment import Augment
from mae_vit.data.index import open_index
from mae_vit.data.loader import load_batches, start_worker_server
from mae_vit.data.order import GlobalOrder, Share, micro_batches, permute
from mae_vit.data.reading import open_source
from mae_vit.keyed import Stream, derive_key
from mae_vit.masking import corrupt, patch_ranks, random_masking

BATCH = 96


@pytest.mark.parametrize("num_samples", [1, 2, 3, 10, 97, 1534, 4096])
def test_permutation_is_one(num_samples):
    order = permute(np.arange(num_samples), num_samples, derive_key(0, Stream.ORDER, 0))
    assert sorted(order) == list(range(num_samples))


def test_permutation_has_no_memory_and_reaches_a_billion():
    key = derive_key(0, Stream.ORDER, 0)
    far = permute(np.array([0, 999_999_999, 123_456_789]), 10**9, key)
    assert len(set(far.tolist())) == 3
    assert 0 <= far.min() <= far.max() < 10**9
    assert permute(np.array([123_456_789]), 10**9, key)[0] == far[2]


def test_permutation_looks_random():
    """Where sample 0 lands, and which pairs follow each other, over many keys."""
    n, draws = 60, 6000
    places, follows = np.zeros(n), np.zeros(n)
    for epoch in range(draws):
        order = permute(np.arange(n), n, derive_key(1, Stream.ORDER, epoch))
        places[order[0]] += 1
        follows[(order[1] - order[0]) % n] += 1
    # 100 each, standard deviation 10.
    assert abs(places - draws / n).max() < 50
    assert follows[0] == 0
    assert abs(follows[1:] - draws / (n - 1)).max() < 50


def test_permutation_refuses_nothing_and_too_much():
    for num_samples in (0, 2**32 + 1):
        with pytest.raises(ValueError, match="samples"):
            permute(np.arange(1), num_samples, (0, 0))


def test_epochs_differ_and_each_holds_every_sample_once():
    order = GlobalOrder(1534, BATCH, seed=0)
    epochs = []
    for epoch in (0, 1):
        start = epoch * order.steps_per_epoch
        steps = micro_batches(order, Share(), start_step=start, stop_step=start + order.steps_per_epoch)
        samples = np.concatenate([samples for number, samples in steps if number == epoch])
        assert len(samples) == 1534 // BATCH * BATCH
        assert len(set(samples.tolist())) == len(samples)
        epochs.append(samples)
    assert (epochs[0] == epochs[1]).mean() < 0.01
    assert set(epochs[0].tolist()) != set(epochs[1].tolist())  # another remainder is dropped


def digest_of_global_batches(digits, source_name, world_size, workers, steps, accumulation=1):
    """For each step: ids, pixel bytes, masks and corruption of the global batch, in order."""
    augment = Augment(
        img_size=(8, 8), crop="random_resized", scale=(0.2, 1.0), ratio=(0.75, 4 / 3), flip=True
    )
    index = open_index(digits, "train")
    order = GlobalOrder(len(index), BATCH, seed=7)
    parts = []
    for rank in range(world_size):
        source = open_source(index, source_name, channels=1, augment=augment, memory_limit_gib=1)
        batches = load_batches(
            source,
            order,
            Share(rank, world_size, accumulation),
            start_step=steps.start,
            stop_step=steps.stop,
            workers=workers,
        )
        parts.append(list(batches))
        assert len(parts[-1]) == len(steps) * accumulation
    digests = []
    for number in range(len(steps)):
        micro = [p for part in parts for p in part[number * accumulation : (number + 1) * accumulation]]
        content = [torch.cat([b.keys.index for b in micro]), torch.cat([b.images for b in micro])]
        content.append(torch.cat([b.labels for b in micro]))
        content.append(torch.cat([random_masking(patch_ranks(b.keys, 16), 0.75).mask for b in micro]))
        for name in ("ids", "kind", "source"):
            drawn = [
                getattr(corrupt(b.keys, 16, corrupt_ratio=0.5, mask_share=0.8, random_share=0.1), name)
                for b in micro
            ]
            content.append(torch.cat(drawn))
        assert {b.keys.epoch for b in micro} == {(steps.start + number) // order.steps_per_epoch}
        digests.append(hashlib.sha256(b"".join(t.numpy().tobytes() for t in content)).hexdigest())
    return digests


@pytest.mark.parametrize("source_name", ["memory", "tar"])
def test_global_batches_do_not_depend_on_ranks_or_workers(digits, source_name):
    start_worker_server()
    steps = range(0, 2 * (1534 // BATCH))  # two epochs
    expected = digest_of_global_batches(digits, source_name, 1, 0, steps)
    assert len(set(expected)) == len(expected)
    for world_size, workers in ((2, 0), (4, 0), (1, 2), (2, 2), (4, 2)):
        assert digest_of_global_batches(digits, source_name, world_size, workers, steps) == expected
    assert digest_of_global_batches(digits, source_name, 2, 0, steps, accumulation=3) == expected
    # From the middle of an epoch on: no state to restore.
    assert digest_of_global_batches(digits, source_name, 2, 2, range(5, 9)) == expected[5:9]


def test_memory_and_tar_give_the_same_pixels(digits):
    steps = range(3)
    assert digest_of_global_batches(digits, "memory", 1, 0, steps) == digest_of_global_batches(
        digits, "tar", 1, 0, steps
    )
