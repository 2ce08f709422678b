"""Damaged samples in training: whole ones in their places, the same whoever loads them."""

import os
import pickle
import shutil
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers.batch_digests import open_digits, order_of
from helpers.damage import WAYS, copy_of, damage, known_key

from mae_vit.core.batch import Batch
from mae_vit.core.errors import DamagedSample
from mae_vit.data.batches.loader import (
    FixedBatches,
    load_batches,
    replacement_candidates,
    start_worker_server,
)
from mae_vit.data.index import open_index
from mae_vit.data.order.order import GlobalOrder, RankSlice
from mae_vit.data.shards import shard_files

STEPS = range(5, 14)  # over the end of an epoch
# Among them neighbors, of which one stands in for none, and the last one of all.
BAD = [*range(40, 48), 399, 400, 700, 900, 1000, 1200, 1496]


@pytest.fixture(scope="module")
def damaged(many_shards, tmp_path_factory):
    """A copy of the shards with samples damaged in five ways: (folder, way of each)."""
    copy = copy_of(many_shards, tmp_path_factory.mktemp("damaged") / "data")
    ways = {sample: list(WAYS)[number % 5] for number, sample in enumerate(BAD)}
    damage(many_shards, copy, ways)
    return copy, ways


def source_of(data, name):
    return open_digits(open_index(data, "train"), name)


def global_batches(source, order, world_size, workers, accumulation=1) -> list[Batch]:
    """The batch of each step over all ranks, put together."""
    by_rank = []
    for rank in range(world_size):
        share = RankSlice(rank, world_size, accumulation)
        options = {"start_step": STEPS.start, "stop_step": STEPS.stop, "workers": workers}
        by_rank.append(list(load_batches(source, order, share, **options)))
    joined = []
    for step in range(len(STEPS)):
        parts = [b for batches in by_rank for b in batches[step * accumulation : (step + 1) * accumulation]]
        keys = parts[0].keys
        index = torch.cat([part.keys.index for part in parts])
        joined.append(
            Batch(
                torch.cat([part.images for part in parts]),
                torch.cat([part.labels for part in parts]),
                type(keys)(keys.seed, keys.epoch, index),
                tuple({d.sample: d for part in parts for d in part.damaged}.values()),
            )
        )
    return joined


def assert_replaced(batches: list[Batch], healthy: list[Batch], whole) -> None:
    """Order and masks are the healthy ones; each image and label is of the first whole sample of its tries."""
    met = set()
    for batch, expected in zip(batches, healthy, strict=True):
        assert (batch.keys.seed, batch.keys.epoch) == (expected.keys.seed, expected.keys.epoch)
        assert torch.equal(batch.keys.index, expected.keys.index)
        paths = [
            list(replacement_candidates(sample, len(whole.labels))) for sample in batch.keys.index.tolist()
        ]
        counts = [next(n for n, place in enumerate(path) if place not in BAD) for path in paths]
        taken = np.array([path[count] for path, count in zip(paths, counts, strict=True)])
        assert np.array_equal(batch.images.numpy(), whole.render(7, batch.keys.epoch, taken).images)
        assert batch.labels.tolist() == whole.labels[taken].tolist()
        passed = {place for path, count in zip(paths, counts, strict=True) for place in path[:count]}
        assert {one.sample for one in batch.damaged} == passed
        assert batch.to(torch.device("cpu")).damaged == batch.damaged
        met |= passed
    assert len(met) >= 10


@pytest.mark.parametrize("mode", ["global", "blocks"])
def test_whole_samples_take_the_places_of_damaged_ones(damaged, many_shards, mode):
    whole, order = source_of(many_shards, "memory"), order_of(many_shards, mode)
    healthy = global_batches(whole, order, 1, 0)
    loaded = [
        global_batches(source_of(damaged[0], name), order_of(damaged[0], mode), 1, 0)
        for name in ("tar", "memory")
    ]
    for batches in loaded:
        assert_replaced(batches, healthy, whole)
    # One loads what is damaged as the other does.
    assert [b.damaged for b in loaded[0]] == [b.damaged for b in loaded[1]]


@pytest.mark.parametrize(("mode", "name"), [("global", "tar"), ("blocks", "memory")])
def test_replacements_do_not_depend_on_ranks_or_workers(damaged, mode, name):
    start_worker_server()
    source, order = source_of(damaged[0], name), order_of(damaged[0], mode)
    expected = global_batches(source, order, 1, 0)
    for world_size, workers, accumulation in ((2, 0, 3), (2, 1, 1)):
        batches = global_batches(source, order, world_size, workers, accumulation)
        for batch, other in zip(expected, batches, strict=True):
            assert torch.equal(batch.images, other.images)
            assert torch.equal(batch.labels, other.labels)
            assert torch.equal(batch.keys.index, other.keys.index)
            assert set(batch.damaged) == set(other.damaged)


@pytest.mark.parametrize("name", ["tar", "memory"])
def test_what_is_damaged_is_named_with_shard_key_offset_and_reason(damaged, many_shards, name):
    folder, ways = damaged
    keys = open_index(many_shards, "train").keys()
    with pytest.raises(DamagedSample) as raised:
        source_of(folder, name).render(0, 0, np.array([3, *BAD, 5]))
    damages = raised.value.damaged
    assert [position for position, _ in damages] == list(range(1, len(BAD) + 1))
    for (_, described), sample in zip(damages, BAD, strict=True):
        assert (described.sample, described.key) == (sample, known_key(keys[sample], ways[sample]))
        assert WAYS[ways[sample]] in described.reason
        assert (folder / described.shard).read_bytes()[described.offset :]
    assert damages[0][1].shard in str(raised.value)
    assert keys[40] in str(raised.value)
    assert f"`mae-vit check {folder}`" in str(raised.value)
    assert str(pickle.loads(pickle.dumps(raised.value))) == str(raised.value)


def test_known_damage_is_not_decoded_again(damaged, monkeypatch):
    source, order = source_of(damaged[0], "tar"), GlobalOrder(1497, 96, seed=7)
    index = source.source.index
    read, asked = type(index).read, []

    def noted(index, sample):
        asked.append(sample)
        return read(index, sample)

    monkeypatch.setattr(type(index), "read", noted)
    for batch in load_batches(source, order, RankSlice(), start_step=0, stop_step=3 * 15):
        assert batch.images.any()
    counts = {sample: asked.count(sample) for sample in BAD}
    assert max(counts.values()) == 1
    assert min(counts.values()) == 1


def test_a_subset_replaces_within_itself(damaged, many_shards):
    samples = np.array([3, 40, 43, 44, 50, 400, 900, 901])
    part, whole = replace(source_of(damaged[0], "tar"), samples=samples), source_of(many_shards, "tar")
    (batch,) = FixedBatches(part, np.array([7, 1, 4, 6]), seed=7, batch_size=4, replace=True)
    # Place 1 goes to 2, then to 4; place 6 to 7.
    assert np.array_equal(batch.images, whole.render(7, 0, samples[[7, 4, 4, 7]]).images)
    assert batch.labels.tolist() == whole.labels[samples[[7, 4, 4, 7]]].tolist()
    assert [damage.sample for damage in batch.damaged] == [40, 43, 900]


def test_tries_are_near_first_and_leave_a_lost_shard():
    assert list(replacement_candidates(6, 8)) == [6, 7, 1, 5, 5]
    path = list(replacement_candidates(10_000, 1_000_000))
    assert path[:4] == [10_000, 10_001, 10_003, 10_007]
    assert next(n for n, place in enumerate(path) if place >= 20_000) == 14
    assert list(replacement_candidates(0, 1)) == [0, 0]


def test_where_nothing_is_whole_the_sample_is_an_error(copy):
    for shard in copy.glob("train-*.tar"):
        shard.write_bytes(shard.read_bytes().replace(b"\x89PNG", b"GARB"))
    batches = load_batches(
        source_of(copy, "tar"), GlobalOrder(1497, 8, 0), RankSlice(), start_step=0, stop_step=1
    )
    with pytest.raises(DamagedSample, match="not an image"):
        next(batches)


def test_a_shard_that_vanishes_or_changes_in_mid_run_is_damage(digits, tmp_path, monkeypatch):
    monkeypatch.setattr(shard_files, "_WAITS_S", (0.0, 0.01))
    # One shard open at a time: each is opened again and again, as in a long run.
    monkeypatch.setattr(shard_files, "_MAX_OPEN_SHARDS", 1)
    copy, whole = copy_of(digits, tmp_path / "data"), source_of(digits, "memory")
    order = GlobalOrder(1497, 128, seed=3)
    batches = load_batches(source_of(copy, "tar"), order, RankSlice(), start_step=0, stop_step=11)
    assert not any(next(batches).damaged for _ in range(3))
    (copy / "train-000001.tar").unlink()
    (copy / "train-000003.tar").write_bytes((copy / "train-000003.tar").read_bytes()[:100_000])
    ends = open_index(digits, "train")._rows[1200:]
    lost = {*range(400, 800), *(1200 + np.flatnonzero(ends["offset"] + ends["length"] > 100_000)).tolist()}
    assert 1240 < min(lost - {*range(400, 800)}) < 1260
    seen = {}
    for batch in batches:
        paths = [replacement_candidates(sample, 1497) for sample in batch.keys.index.tolist()]
        taken = np.array([next(place for place in path if place not in lost) for path in paths])
        assert np.array_equal(batch.images.numpy(), whole.render(3, 0, taken).images)
        seen |= {one.sample: one for one in batch.damaged}
    assert len(seen) > 300
    assert set(seen) <= lost
    reasons = {damage.shard: damage.reason for damage in seen.values()}
    assert reasons.keys() == {"train-000001.tar", "train-000003.tar"}
    assert "gone" in reasons["train-000001.tar"]
    assert f"100,000 of {os.path.getsize(digits / 'train-000003.tar'):,}" in reasons["train-000003.tar"]


def test_each_sample_behind_the_end_of_a_shard_is_not_waited_for(digits, copy, monkeypatch):
    monkeypatch.setattr(shard_files, "_WAITS_S", (0.0, 0.2))
    index, whole = open_index(copy, "train"), open_index(digits, "train")
    os.truncate(copy / "train-000001.tar", 100_000)
    waits: list[float] = []
    monkeypatch.setattr("time.sleep", waits.append)
    for sample in range(500, 800):
        with pytest.raises(shard_files.ReadError, match="truncated"):
            index.read(sample)
        assert index.read(400) == whole.read(400)
    assert waits == [0.2]
    shutil.copy(digits / "train-000001.tar", copy)
    monkeypatch.setattr(shard_files, "_LOST_FOR_S", 0.0)
    assert index.read(700) == whole.read(700)


def test_a_shard_that_is_away_for_a_moment_is_no_damage(digits, copy):
    index, path = open_index(copy, "train"), copy / "train-000001.tar"
    path.rename(copy / "away")
    back = threading.Timer(0.3, (copy / "away").rename, [path])
    back.start()
    assert index.read(500) == open_index(digits, "train").read(500)
    back.join()


def test_a_lost_shard_is_not_waited_for_again_but_may_come_back(many_shards, tmp_path, monkeypatch):
    monkeypatch.setattr(shard_files, "_WAITS_S", (0.0, 0.2))
    copy = copy_of(many_shards, tmp_path / "data")
    index = open_index(copy, "train")
    copy.rename(tmp_path / "away")
    waits: list[float] = []
    monkeypatch.setattr("time.sleep", waits.append)
    for sample in range(0, 1497, 3):
        with pytest.raises(shard_files.ReadError, match="is gone"):
            index.read(sample)
    # Of 64 shards the first eight.
    assert waits == 8 * [0.2]
    (tmp_path / "away").rename(copy)
    with pytest.raises(shard_files.ReadError):
        index.read(0)
    monkeypatch.setattr(shard_files, "_LOST_FOR_S", 0.0)
    assert index.read(0) == open_index(many_shards, "train").read(0)
