"""Labeled subsets and held-out shares: nested, balanced, by keys alone."""

import numpy as np
import pytest
import torch

from mae_vit.config.load import load_config
from mae_vit.config.presets import find_config
from mae_vit.core.errors import InputError
from mae_vit.data.batches.augmented import open_source
from mae_vit.data.batches.subset import draw_held_out, limit_per_class
from mae_vit.data.images.augment import Augment
from mae_vit.data.index import open_index
from mae_vit.data.prepare.prepare import prepare
from mae_vit.data.prepare.selection import Selection
from mae_vit.data.prepare.sources.find import find_images
from mae_vit.finetuning.config.schema import FinetuneConfig
from mae_vit.finetuning.data import open_data as open_finetune_data
from mae_vit.objectives.pretrain_config import PretrainConfig
from mae_vit.pretraining.data import open_data as open_pretrain_data
from mae_vit.runtime.ranks import Ranks

PLAIN = ["model.img_size=8", "model.in_chans=1", "data.augment={crop: none, flip: false}"]


def fine_tuned_on(*words: str, rank: int = 0, of: int = 1):
    config = load_config(FinetuneConfig, find_config("simple_cnn_cifar"), [*PLAIN, *words])
    return open_finetune_data(config, Ranks(rank, of, rank, of), torch.device("cpu"))


@pytest.fixture
def split(digits):
    index = open_index(digits, "train")
    return np.arange(len(index)), np.asarray(index.labels), index.keys()


def test_a_subset_is_that_of_prepare(split, tmp_path):
    samples, labels, keys = split
    for limit in (7, 100):
        taken, rest = limit_per_class(samples, labels, keys, limit)
        assert np.bincount(labels[taken]).tolist() == [limit] * 10
        assert sorted([*taken, *rest]) == samples.tolist()
        out = tmp_path / str(limit)
        digits = [find_images("digits", out=out, split="train", root=None)]
        prepare(digits, out, selection=Selection(limit_per_class=limit))
        assert set(open_index(out, "train").keys()) == {keys[sample] for sample in taken}
    everything, rest = limit_per_class(samples, labels, keys, 10_000)
    assert (everything.tolist(), len(rest)) == (samples.tolist(), 0)


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


def test_blocks_of_a_subset(many_shards):
    options = [f"data.path={many_shards}", "data.labels_per_class=20", "train.effective_batch_size=32"]
    orders = []
    for mode in ("blocks", "global"):
        data = fine_tuned_on(*options, f"data.order={mode}")
        # Places among the samples that are trained on, each once.
        places = data.order.samples(0, 0, len(data.train) // 32 * 32)
        assert len(set(places.tolist())) == len(places)
        assert 0 <= places.min() <= places.max() < len(data.train) == data.num_samples == 180
        orders.append((type(data.order).__name__, places))
    (blocks, one), (whole, other) = orders
    assert (blocks, whole) == ("BlockOrder", "GlobalOrder")
    assert (one == other).mean() < 0.5


def test_classes_with_fewer_labels_are_counted(digits, capsys, monkeypatch):
    """No class gives more images than it has, so a run says when a subset is smaller than it was asked for."""
    place = [f"data.path={digits}", "finetune.holdout=0"]
    counts = np.bincount(open_index(digits, "train").labels)
    assert counts.min() < counts.max()

    def trained_on(limit, rank=0):
        return len(fine_tuned_on(*place, f"data.labels_per_class={limit}", rank=rank, of=2).train)

    said = f"data.labels_per_class={counts.max()}: {(counts < counts.max()).sum()} of 10 classes have fewer "
    assert trained_on(counts.max()) == counts.sum()
    assert said + f"(fewest: {counts.min()})\n" in capsys.readouterr().out
    trained_on(counts.max(), rank=1)
    assert trained_on(counts.min()) == 10 * counts.min()
    assert "have fewer" not in capsys.readouterr().out
    # A class may have no training image at all.
    monkeypatch.setattr("mae_vit.finetuning.data.read_labels", lambda _, index: np.asarray(index.labels) + 1)
    with pytest.raises(InputError, match=rf"; give {counts.min()} or fewer$"):
        trained_on(9999)


def test_what_pretraining_leaves_out_is_what_fine_tuning_takes(digits):
    """A start that has seen labels has seen none of those that it is fine-tuned and chosen by."""
    taken = fine_tuned_on(f"data.path={digits}", "data.labels_per_class=20")

    def pretrained_on(*words):
        more = [*PLAIN, f"data.path={digits}", "data.leave_out_per_class=20", "model.patch_size=2", *words]
        config = load_config(PretrainConfig, find_config("supervised_cifar_tiny"), more)
        return open_pretrain_data(config, Ranks(), torch.device("cpu"))

    data = pretrained_on()
    assert data.num_samples == 1497 - 200
    labels = np.asarray(data.index.labels)
    seen = np.sort(np.concatenate([taken.train, taken.held_out]))
    rest = np.setdiff1d(np.arange(1497), seen)
    assert np.array_equal(data.source.labels, labels[rest])
    keys = data.index.keys()
    draws = [limit_per_class(np.arange(1497), labels, keys, 20, draw=draw)[0] for draw in range(3)]
    assert np.array_equal(np.sort(draws[0]), seen)
    others = np.setdiff1d(np.arange(1497), np.concatenate(draws))
    assert len(others) < 1497 - 500, "draws overlap little"
    assert np.array_equal(pretrained_on("data.leave_out_draws=3").source.labels, labels[others])
    plain = open_source(data.index, "auto", channels=1, augment=Augment(img_size=(8, 8)), memory_limit_gib=1)
    places = np.array([0, 5, len(rest) - 1])
    assert np.array_equal(data.source.render(0, 0, places).images, plain.render(0, 0, rest[places]).images)


def test_draws_take_other_labels_and_other_held_out_images():
    """Draw 0 is as ever; each further number takes other images, of the same sizes."""
    labels = np.repeat(np.arange(4), 100)
    keys, samples = [f"image-{number}" for number in range(400)], np.arange(400)
    draws = [limit_per_class(samples, labels, keys, 20, draw=draw)[0] for draw in range(3)]
    assert np.array_equal(draws[0], limit_per_class(samples, labels, keys, 20)[0])
    assert [len(taken) for taken in draws] == [80] * 3
    # Of 80 in 400 drawn apart about 16 are in both.
    assert all(len(np.intersect1d(draws[a], draws[b])) < 40 for a, b in ((0, 1), (0, 2), (1, 2)))
    held_out = [draw_held_out(draws[0], labels, keys, 0.2, draw=draw)[0] for draw in range(2)]
    assert [len(one) for one in held_out] == [16, 16]
    assert not np.array_equal(*held_out)
