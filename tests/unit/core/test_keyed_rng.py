"""Threefry against its published vectors, and NumPy against torch."""

import numpy as np
import pytest
import torch

from mae_vit.core.keyed_rng import (
    RngStream,
    SampleKeys,
    ViewKeys,
    derive_key,
    noise_seed,
    random_uint32,
    threefry2x32,
)

# Random123's kat_vectors, threefry 2x32 with 20 rounds: counter, key, result.
KNOWN = [
    ((0x00000000, 0x00000000), (0x00000000, 0x00000000), (0x6B200159, 0x99BA4EFE)),
    ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0x1CB996FC, 0xBB002BE7)),
    ((0x243F6A88, 0x85A308D3), (0x13198A2E, 0x03707344), (0xC4923A9C, 0x483DF7A0)),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_known_answers(counter, key, expected):
    in_numpy = threefry2x32(key, *(np.array([word], np.uint32) for word in counter))
    in_torch = threefry2x32(key, *(torch.tensor([word]) for word in counter))
    assert tuple(int(word[0]) for word in in_numpy) == expected
    assert tuple(int(word[0]) for word in in_torch) == expected


@pytest.mark.parametrize(("seed", "epoch"), [(0, 0), (2**40 + 3, 7), (2**64 - 1, 2**32 - 1)])
def test_streams_drawn_at_once_are_those_drawn_alone(seed, epoch):
    keys, streams = SampleKeys(seed, epoch, torch.tensor([0, 1, 2**32 - 1])), (RngStream.MASK, RngStream.MIX)
    expected = torch.stack([keys.random_uint32(stream, 5) for stream in streams])
    assert torch.equal(keys.random_uint32_of_each(streams, 5), expected)
    in_numpy = [
        random_uint32(derive_key(seed, stream, epoch), keys.index.numpy(), 5)[0] for stream in streams
    ]
    np.testing.assert_array_equal(expected.numpy(), np.stack(in_numpy).astype(np.int64))


def test_a_draw_depends_on_its_sample_alone():
    keys = SampleKeys(1, 2, torch.arange(100))
    alone = SampleKeys(1, 2, torch.tensor([42]))
    assert torch.equal(keys.random_uint32(RngStream.MASK, 7)[42], alone.random_uint32(RngStream.MASK, 7)[0])


@pytest.mark.parametrize("change", [{"seed": 2**33}, {"stream": RngStream.FLIP}, {"epoch": 1}])
def test_seed_stream_and_epoch_each_matter(change):
    base = {"seed": 0, "stream": RngStream.CROP, "epoch": 0}
    index = np.arange(50)
    first = random_uint32(derive_key(**base), index, 2)[0]
    second = random_uint32(derive_key(**{**base, **change}), index, 2)[0]
    assert (first != second).mean() > 0.9


def test_noise_differs_by_rank_step_and_micro_batch():
    places = [
        (rank, step, micro) for rank in (0, 1, 2, 4095) for step in (0, 1) for micro in (0, 1, 4096, 8192)
    ]
    assert len({noise_seed(3, *place) for place in places}) == len(places)
    assert noise_seed(3, 1, 2, 3) != noise_seed(4, 1, 2, 3)


def test_uniform_numbers_are_uniform():
    numbers = ViewKeys(0, 0, np.arange(20_000)).uniform(RngStream.CROP, 3)
    assert numbers.dtype == np.float64
    assert numbers.min() >= 0
    assert numbers.max() < 1
    counts, _ = np.histogram(numbers, bins=20, range=(0, 1))
    # 60,000 draws in 20 bins: 3,000 each, standard deviation 53.
    assert abs(counts - 3000).max() < 5 * 53
    assert abs(np.corrcoef(numbers.T) - np.eye(3)).max() < 0.03
