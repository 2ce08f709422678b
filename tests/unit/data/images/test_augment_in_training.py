"""Augmented views as training takes them: keyed, the same from every source, by the config."""

import hashlib
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers.images import smooth

from mae_vit.config.data import AugmentSection
from mae_vit.config.load import load_config
from mae_vit.config.presets import find_config
from mae_vit.core.keyed_rng import ViewKeys
from mae_vit.data.batches.augmented import Views, open_source
from mae_vit.data.batches.loader import choose_workers
from mae_vit.data.images.augment import Augment
from mae_vit.data.images.auto_augment import RANDAUGMENT, AutoAugmentCifar, RandAugment
from mae_vit.data.index import open_index
from mae_vit.data.views import fill_color, make_policy
from mae_vit.finetuning.config.schema import FinetuneConfig
from mae_vit.finetuning.data import open_data as open_finetune_data
from mae_vit.objectives.pretrain_config import PretrainConfig
from mae_vit.pretraining.data import open_data
from mae_vit.runtime.ranks import Ranks

FILL = (120, 60, 30)
CROPS = {
    "none": {"crop": "none"},
    "pad": {"crop": "pad", "pad_px": 4, "flip": True},
    "random_resized": {"crop": "random_resized", "scale": (0.2, 1.0), "ratio": (3 / 4, 4 / 3), "flip": True},
}


def test_draws_of_a_seed_stay_what_they_are():
    """They are part of the data format: a run that goes on takes up where it was."""
    index = np.arange(400)
    drawn = [policy.draw(ViewKeys(7, 3, index)) for policy in (RandAugment(num_ops=3), AutoAugmentCifar())]
    content = [[(op, [round(value, 4) for value in values]) for op, values in sum(d, ())] for d in drawn]
    erasing = Augment(img_size=(32, 32), erasing=0.3).draw(7, 3, index).erasing
    images = np.zeros((400, 1, 32, 32), np.uint8)
    erasing.fill(images)
    parts = [repr(content[0]).encode(), repr(content[1]).encode(), images.tobytes()]
    digests = [hashlib.sha256(part).hexdigest()[:16] for part in parts]
    assert digests == ["d48c83b2bdacfcd3", "7b044026a3747b11", "fa01d0d6a12fa49b"]


@pytest.mark.parametrize("name", ["memory", "tar"])
def test_images_go_where_they_are_asked_for(digits, name):
    """And are the same from both sources."""
    index = open_index(digits, "train")
    augment = Augment(
        img_size=(12, 16), **CROPS["random_resized"], policy=RandAugment(), erasing=0.5, fill=(90,)
    )
    tar, source = (
        open_source(index, kind, channels=1, augment=augment, memory_limit_gib=1) for kind in ("tar", name)
    )
    samples = np.array([3, 700, 41])
    part = replace(source, samples=samples)
    expected = tar.render(7, 2, samples)
    assert source.shape == part.shape == expected.images.shape[1:]
    for taken, places in ((source, samples), (part, np.arange(3))):
        out = Views(np.zeros_like(expected.images), np.zeros(3, np.int64), None)
        assert taken.render(7, 2, places, out=out) is out
        np.testing.assert_array_equal(out.images, expected.images)
        np.testing.assert_array_equal(out.labels, index.labels[samples])


@pytest.mark.parametrize(
    ("cores", "on_gpu", "policies", "memory", "tar"),
    [
        (4, False, False, 0, 3),
        (4, False, True, 0, 3),
        # The thread that launches a GPU's work does nothing else.
        (1, True, False, 1, 1),
        (4, True, False, 3, 3),
        # A core more for every eight: the thread that pins batches.
        (8, True, False, 4, 6),
        (16, True, False, 4, 13),
        (16, False, False, 0, 15),
        # A policy takes as long as decoding.
        (12, True, True, 10, 10),
        (64, True, True, 16, 16),
    ],
)
def test_workers_beside_a_gpu_and_a_cpu(digits, cores, on_gpu, policies, memory, tar):
    index = open_index(digits, "train")
    for name, expected in (("memory", memory), ("tar", tar)):
        augment = Augment(img_size=(8, 8), policy=RandAugment() if policies else None)
        source = open_source(index, name, channels=1, augment=augment, memory_limit_gib=1)
        assert choose_workers("auto", source, cores=cores, on_gpu=on_gpu) == expected
        assert choose_workers(7, source, cores=cores, on_gpu=on_gpu) == 7


# Of the code before there were policies: boxes and flips, pixels.
BEFORE = {
    "none": ("800c63f97e89135a", "ba558089cced6c0c"),
    "pad": ("7c33b25888002ebe", "8e602cb721622f0e"),
    "random_resized": ("b217286356a511af", None),  # of a resize by torch, whose version may change it
}


@pytest.mark.parametrize("crop", CROPS)
def test_without_policy_and_erasing_all_is_as_before(crop):
    numbers = np.arange(64 * 3 * 16 * 16, dtype=np.int64) * 2654435761 % 2**32 >> 24
    images = numbers.astype(np.uint8).reshape(64, 3, 16, 16)
    changes = {**CROPS[crop], **({"pad_px": 3} if crop == "pad" else {})}
    augment = Augment(img_size=(16, 16), **changes, policy=make_policy(AugmentSection()), fill=FILL)
    view = augment.draw(7, 3, np.arange(100, 164))
    assert view.calls is None
    assert view.erasing is None
    drawn = augment.boxes(view, (16, 16)).astype("<i8").tobytes() + view.flips.tobytes()
    pixels = augment.apply(images, view).tobytes()
    for content, digest in zip((drawn, pixels), BEFORE[crop], strict=True):
        assert digest in (None, hashlib.sha256(content).hexdigest()[:16])


def test_the_policy_comes_after_the_flip_and_erasing_after_the_policy():
    images = smooth(3, 32, 32, count=200)
    augment = Augment(img_size=(32, 32), flip=True, policy=RandAugment(), erasing=1.0, fill=FILL)
    view = augment.draw(0, 0, np.arange(200))
    batch = augment.apply(images, view)
    for number in np.flatnonzero([bool(calls) for calls in view.calls])[:40]:
        image = images[number, ..., ::-1] if view.flips[number] else images[number]
        expected = augment.policy.apply(image, view.calls[number], FILL)
        top, left, height, width = view.erasing.boxes[number]
        outside = np.ones((32, 32), bool)
        outside[top : top + height, left : left + width] = False
        np.testing.assert_array_equal(batch[number][:, outside], expected[:, outside])
        # Bytes are as on an image that nothing else happened to.
        alone = Augment(img_size=(32, 32), erasing=1.0)
        noise = alone.apply(images, alone.draw(0, 0, np.arange(200)))[number]
        np.testing.assert_array_equal(batch[number][:, ~outside], noise[:, ~outside])


def test_fill_is_the_datas_mean_as_timm_rounds_it():
    assert fill_color((0.485, 0.456, 0.406)) == (124, 116, 104)
    assert fill_color((0.5, 1.2, -0.1)) == (128, 255, 0)
    image = np.full((3, 16, 16), 200, np.uint8)
    shift = (RANDAUGMENT["TranslateXRel"].call("TranslateXRel", 10.0, 1),)
    np.testing.assert_array_equal(RandAugment().apply(image, shift, FILL)[:, 8, -1], FILL)
    np.testing.assert_array_equal(RandAugment().apply(image, shift, None)[:, 8, -1], (0, 0, 0))


def configured(schema, digits, *overrides: str):
    return load_config(
        schema, find_config("mae_digits"), [f"data.path={digits}", "run.dir=nowhere", *overrides]
    )


RANDAUGMENTED = "data.augment.policy=randaugment"
OPTIONS = [
    (),
    (RANDAUGMENTED,),
    (RANDAUGMENTED, "data.augment.num_ops=3"),
    (RANDAUGMENTED, "data.augment.magnitude=4"),
    (RANDAUGMENTED, "data.augment.magnitude_std=2"),
    (RANDAUGMENTED, "data.normalize=half"),  # another color comes in
    ("data.augment.policy=autoaugment_cifar",),
    ("data.augment.erasing=0.25",),
    ("data.augment.erasing=0.75",),
]


def test_each_option_changes_images_of_training_and_those_alone(digits):
    cpu, samples = torch.device("cpu"), np.arange(200)
    trained, held_out = set(), set()
    for overrides in OPTIONS:
        data = open_data(configured(PretrainConfig, digits, *overrides), Ranks(), cpu)
        trained.add(data.source.render(0, 0, samples).images.tobytes())
        held_out.add(data.held_out_source.render(0, 0, samples).images.tobytes())
    assert (len(trained), len(held_out)) == (len(OPTIONS), 1)


def test_fine_tuning_measures_on_plain_images(digits):
    cpu, samples = torch.device("cpu"), np.arange(100)
    plain = [f"data.path={digits}", "model.img_size=8", "model.in_chans=1"]
    trained, measured = set(), set()
    for overrides in ((), (RANDAUGMENTED,), ("data.augment.erasing=0.5",)):
        config = load_config(FinetuneConfig, find_config("simple_cnn_cifar"), [*plain, *overrides])
        data = open_finetune_data(config, Ranks(), cpu)
        trained.add(data.source.render(0, 0, samples).images.tobytes())
        views = [source.render(0, 0, samples).images for source in (data.plain, data.open_test())]
        measured.add(views[0].tobytes() + views[1].tobytes())
    assert (len(trained), len(measured)) == (3, 1)
