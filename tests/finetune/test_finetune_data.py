"""Labeled subsets and held-out shares: nested, balanced, by keys alone."""

import numpy as np
import pytest

from mae_vit.data.index import open_index
from mae_vit.data.prepare import prepare
from mae_vit.data.selection import Selection
from mae_vit.data.sources import open_source
from mae_vit.data.subset import SubsetSource, draw_held_out, limit_per_class


@pytest.fixture
def split(digits):
    index = open_index(digits, "train")
    return np.arange(len(index)), np.asarray(index.labels), index.keys()


def test_keys_are_those_of_the_tars_and_are_kept(digits, split, monkeypatch):
    from mae_vit.data import index as index_module
    from mae_vit.data.samples import read_samples

    keys = split[2]
    assert keys == [s.key for path in sorted(digits.glob("train-*.tar")) for s in read_samples(path)]
    monkeypatch.setattr(index_module, "read_samples", None)
    assert open_index(digits, "train").keys() == keys


def test_smaller_subsets_are_inside_larger_ones(split):
    samples, labels, keys = split
    before: set = set()
    for limit in (1, 5, 20, 100):
        taken, rest = limit_per_class(samples, labels, keys, limit)
        assert np.bincount(labels[taken]).tolist() == [limit] * 10
        assert before < set(taken.tolist())
        assert sorted([*taken, *rest]) == samples.tolist()
        before = set(taken.tolist())
    everything, rest = limit_per_class(samples, labels, keys, 10_000)
    assert np.array_equal(everything, samples)
    assert not len(rest)


def test_a_subset_is_that_of_prepare(digits, split, tmp_path):
    samples, labels, keys = split
    taken, _ = limit_per_class(samples, labels, keys, 7)
    prepare(
        [open_source("digits", out=tmp_path, split="train", root=None)],
        tmp_path,
        selection=Selection(limit_per_class=7),
    )
    assert set(open_index(tmp_path, "train").keys()) == {keys[sample] for sample in taken}


def test_the_draw_depends_on_keys_not_on_their_order(split):
    samples, labels, keys = split
    shuffled = np.random.default_rng(0).permutation(len(samples))
    for draw, argument in ((limit_per_class, 9), (draw_held_out, 0.1)):
        one, _ = draw(samples, labels, keys, argument)
        other, _ = draw(samples, labels[shuffled], [keys[place] for place in shuffled], argument)
        assert {keys[place] for place in one} == {keys[shuffled[place]] for place in other}


def test_held_out_images_are_a_share_of_each_class(split):
    samples, labels, keys = split
    held_out, train = draw_held_out(samples, labels, keys, 0.1)
    assert not set(held_out) & set(train)
    assert len(held_out) + len(train) == len(samples)
    expected = [int(0.1 * count + 0.5) for count in np.bincount(labels)]
    assert np.bincount(labels[held_out]).tolist() == expected
    few, _ = limit_per_class(samples, labels, keys, 2)
    held_out, train = draw_held_out(few, labels, keys, 0.1)
    assert np.bincount(labels[held_out]).tolist() == np.bincount(labels[train]).tolist() == [1] * 10
    one, _ = limit_per_class(samples, labels, keys, 1)
    held_out, train = draw_held_out(one, labels, keys, 0.5)
    assert (len(held_out), len(train)) == (0, 10)


def test_a_view_does_not_depend_on_the_subset(digits):
    from mae_vit.data import reading
    from mae_vit.data.augment import Augment

    index = open_index(digits, "train")
    views = Augment(img_size=(8, 8), crop="pad", pad_px=2, flip=True)
    source = reading.open_source(index, "memory", channels=1, augment=views, memory_limit_gib=1)
    samples = np.array([3, 40, 41, 900])
    part = SubsetSource(source, samples)
    assert np.array_equal(part.images(7, 2, np.array([2, 0])), source.images(7, 2, np.array([41, 3])))
    assert part.labels.tolist() == index.labels[samples].tolist()


def test_blocks_of_a_subset(call, many_shards, tmp_path):
    options = [f"data.path={many_shards}", "data.order=blocks", "train.effective_batch_size=32"]
    assert call(*options, "data.labels_per_class=20", "train.steps=4", name="blocks") == 0
    assert call(*options[:1], options[2], "data.labels_per_class=20", "train.steps=4", name="global") == 0
    models = {(tmp_path / name / "model.safetensors").read_bytes() for name in ("blocks", "global")}
    assert len(models) == 2
