"""The order mode `blocks`: the same batches for any ranks, each of which reads its own shards."""

from collections import Counter

import numpy as np
import pytest

from mae_vit.data.index import open_index
from mae_vit.data.order.order import BlockOrder, RankSlice, micro_batches

BATCH, LANES, BLOCK = 96, 8, 2
UNEVEN = [7, 1, 30, 12, 5, 40, 2, 2, 19, 64, 11]  # 193 samples


def counts_of(data):
    return [shard.samples for shard in open_index(data, "train").split_info.shards]


def order_of(data, **options):
    options = {"effective_batch_size": BATCH, "seed": 7, "lanes": LANES, "block_shards": BLOCK} | options
    return BlockOrder(counts_of(data), **options)


def epoch_of(order, epoch):
    return order.samples(epoch, 0, order.steps_per_epoch * order.effective_batch_size)


@pytest.mark.parametrize(
    ("batch", "lanes", "block_shards"),
    [(12, 1, 1), (12, 4, 2), (12, 12, 3), (193, 1, 11), (60, 15, 50), (1, 1, 2)],
)
def test_each_epoch_holds_every_sample_once(batch, lanes, block_shards):
    order = BlockOrder(UNEVEN, effective_batch_size=batch, seed=3, lanes=lanes, block_shards=block_shards)
    assert order.steps_per_epoch == 193 // batch
    epochs = [epoch_of(order, epoch) for epoch in (0, 1)]
    for samples in epochs:
        assert len(samples) == 193 // batch * batch
        assert len(set(samples.tolist())) == len(samples)
        assert 0 <= samples.min() <= samples.max() < 193
    assert (epochs[0] == epochs[1]).mean() < 0.1
    if 193 % batch:
        assert set(epochs[0].tolist()) != set(epochs[1].tolist())  # another remainder is dropped


def test_a_position_is_computed_on_its_own(many_shards):
    order = order_of(many_shards)
    whole = [epoch_of(order, epoch) for epoch in (0, 1)]
    chance = np.random.default_rng(0)
    for _ in range(40):
        epoch, start = int(chance.integers(2)), int(chance.integers(len(whole[0])))
        stop = int(chance.integers(start, len(whole[0]))) + 1
        np.testing.assert_array_equal(order.samples(epoch, start, stop), whole[epoch][start:stop])
        np.testing.assert_array_equal(
            order_of(many_shards).samples(epoch, start, stop), whole[epoch][start:stop]
        )


@pytest.mark.parametrize("change", [{"seed": 8}, {"lanes": 4}, {"block_shards": 3}])
def test_each_option_changes_the_order(many_shards, change):
    before, after = epoch_of(order_of(many_shards), 0), epoch_of(order_of(many_shards, **change), 0)
    assert (before == after).mean() < 0.5


def test_memory_grows_with_shards_alone():
    """A billion samples in 1000 shards, anywhere in the epoch."""
    order = BlockOrder([10**6] * 1000, effective_batch_size=4096, seed=0, lanes=8, block_shards=4)
    end = order.steps_per_epoch * 4096
    parts = [order.samples(0, start, start + 4096) for start in (0, end // 2 // 4096 * 4096, end - 4096)]
    assert len(set(np.concatenate(parts).tolist())) == 3 * 4096
    assert max(batch.max() for batch in parts) < 10**9
    kept = [*vars(order).values(), *vars(order._layout(0)).values(), *order._layout(0).block_keys]
    assert max(len(array) for array in kept if isinstance(array, np.ndarray)) <= 1001


def test_the_shuffle_looks_random():
    """Where shards land, which of them share a block, and where samples land in their block."""
    shards, size, lanes, epochs = 64, 32, 8, 100
    order = BlockOrder([size] * shards, effective_batch_size=64, seed=1, lanes=lanes, block_shards=2)
    places, partners, within = np.zeros((16, 16)), np.zeros((8, 8)), np.zeros((size, 2 * size))
    for epoch in range(epochs):
        # Lane after lane, as blocks of two shards: (block, place in it).
        steps = epoch_of(order, epoch).reshape(-1, lanes, 64 // lanes)
        blocks = steps.transpose(1, 0, 2).reshape(-1, 2 * size)
        shard, sample = np.divmod(blocks, size)
        pair = np.sort(shard, axis=1)[:, [0, -1]]
        assert (((shard == pair[:, :1]) | (shard == pair[:, 1:])).sum(axis=1) == 2 * size).all()
        np.add.at(places, (pair // 4, np.arange(32)[:, None] // 2), 1)
        np.add.at(partners, (pair // 8, pair[:, ::-1] // 8), 1)
        np.add.at(within, (sample, np.broadcast_to(np.arange(2 * size), sample.shape)), 1)
    # Means with 5 standard deviations of their counts, sqrt(mean); pairs are counted twice.
    assert abs(places - 25).max() < 25
    assert abs(partners - 100).max() < 71
    assert abs(within - 100).max() < 50


def test_a_lane_reads_few_shards_at_a_time(many_shards):
    order = order_of(many_shards)
    shard_of = np.repeat(np.arange(64), counts_of(many_shards))
    for epoch in (0, 1):
        steps = epoch_of(order, epoch).reshape(-1, LANES, BATCH // LANES)
        seen = Counter()
        for lane in range(LANES):
            shards = shard_of[steps[:, lane].ravel()]
            seen.update(set(shards.tolist()))
            # Once a block is left, its shards do not come back.
            first = {shard: np.flatnonzero(shards == shard)[0] for shard in set(shards.tolist())}
            last = {shard: np.flatnonzero(shards == shard)[-1] for shard in first}
            for place in range(len(shards)):
                assert sum(first[shard] <= place <= last[shard] for shard in first) <= BLOCK
        # Shards in two lanes are those of blocks that lie across a cut.
        assert sum(count > 1 for count in seen.values()) <= (LANES - 1) * BLOCK


def test_shards_of_a_rank_that_shares_its_lane(many_shards):
    order = order_of(many_shards)
    assert list(order.shards_of(RankSlice(5, 16), 0)) == list(order.shards_of(RankSlice(4, 16), 0))
    assert list(order.shards_of(RankSlice(5, 16), 0)) == list(order.shards_of(RankSlice(2, 8), 0))
    shard_of = np.repeat(np.arange(64), counts_of(many_shards))
    for world_size in (1, 4, 16):
        opened = Counter()
        for rank in range(world_size):
            share = RankSlice(rank, world_size)
            batches = micro_batches(order, share, start_step=0, stop_step=order.steps_per_epoch)
            used = {int(shard) for _, batch in batches for shard in shard_of[batch]}
            assert used <= set(order.shards_of(share, 0).tolist())
            opened.update(used)
        # All shards but what the dropped remainder may hold; those across the cuts between ranks twice.
        assert len(opened) >= 64 - 3
        assert world_size > LANES or sum(opened.values()) <= 64 + (world_size - 1) * BLOCK
