"""Batches made on the device: those of the host's loader, to the bit; where they are made, and why."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers.batch_digests import open_digits, order_of
from helpers.damage import WAYS, copy_of, damage
from helpers.fake_cuda import CUDA, fake_cuda
from torch import Tensor
from workers.device_sync import counted

from mae_vit.core.errors import InputError
from mae_vit.data.batches.augmented import open_source
from mae_vit.data.batches.loader import load_batches
from mae_vit.data.batches.on_device import DeviceImages, Place, choose_place
from mae_vit.data.images.augment import Augment
from mae_vit.data.images.auto_augment import RandAugment
from mae_vit.data.images.color import ColorJitter
from mae_vit.data.index import open_index
from mae_vit.data.order.order import GlobalOrder, RankSlice, RepeatedOrder, micro_batches

CPU, ALONE = torch.device("cpu"), RankSlice()
STEPS = {"start_step": 13, "stop_step": 18}  # over the end of an epoch
BOX = {"crop": "random_resized", "scale": (0.2, 1.0), "ratio": (3 / 4, 4 / 3), "flip": True}
VIEWS = {
    "none": {},
    "pad": {"crop": "pad", "pad_px": 2, "flip": True},
    "random_resized": BOX,
    "color": {**BOX, "policy": ColorJitter()},
}


def open_views(data, channels=3, size=8, name="memory", **options):
    augment = Augment(img_size=(size, size), **options)
    return open_source(
        open_index(data, "train"), name, channels=channels, augment=augment, memory_limit_gib=1
    )


def assert_equal_batches(source, order, rank_slice=ALONE, *, skipped=()):
    images = DeviceImages(source, CPU, seed=order.seed, repeats=order.repeats)
    expected = list(load_batches(source, order, rank_slice, **STEPS, skipped=skipped))
    positions = micro_batches(order, rank_slice, **STEPS, skipped=skipped)
    found = [images.batch(epoch, places) for epoch, places in positions]
    assert len(found) == len(expected) > 0
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours.images, theirs.images)
        assert torch.equal(ours.labels, theirs.labels)
        assert torch.equal(ours.keys.index, theirs.keys.index)
        assert (ours.keys.seed, ours.keys.epoch) == (theirs.keys.seed, theirs.keys.epoch)
        assert (ours.images.dtype, ours.images.is_contiguous()) == (torch.uint8, True)
    return found, expected


@pytest.mark.parametrize("views", VIEWS)
@pytest.mark.parametrize("repeats", [1, 2])
def test_batches_are_those_of_the_host(digits, views, repeats):
    order = GlobalOrder(1497, 96 // repeats, seed=7)
    order = order if repeats == 1 else RepeatedOrder(order, repeats)
    assert_equal_batches(open_views(digits, **VIEWS[views]), order, skipped=((14, 15),))


def test_batches_of_a_rank_and_of_a_part_are_those_of_the_host(digits, many_shards):
    source = open_views(digits, channels=1, size=6, **BOX)
    assert_equal_batches(source, GlobalOrder(1497, 96, seed=7), RankSlice(1, 2, 3))
    part = replace(source, samples=np.arange(3, 1203, 2))
    assert_equal_batches(part, GlobalOrder(600, 40, seed=7))
    assert_equal_batches(
        open_digits(open_index(many_shards, "train"), "memory"), order_of(many_shards, "blocks")
    )


def test_damaged_samples_are_replaced_as_on_the_host(many_shards, tmp_path):
    copy = copy_of(many_shards, tmp_path / "data")
    bad = [*range(40, 48), 400, 700, 1200, 1496]
    damage(many_shards, copy, {sample: list(WAYS)[n % 5] for n, sample in enumerate(bad)})
    source = open_digits(open_index(copy, "train"), "memory")
    found, expected = assert_equal_batches(source, GlobalOrder(1497, 96, seed=7))
    # The host names a damaged sample from the first batch on that meets it; so does the device.
    assert [set(batch.damaged) for batch in found] == [set(batch.damaged) for batch in expected]
    assert sum(len(batch.damaged) for batch in found) > 2


def test_on_a_gpu_nothing_waits_and_nothing_of_the_cpu_is_mixed_in(digits, monkeypatch):
    monkeypatch.setattr(Tensor, "pin_memory", lambda tensor: tensor)
    order = GlobalOrder(1497, 96, seed=7)
    for options in VIEWS.values():
        source = open_views(digits, **options)
        with fake_cuda():
            images = DeviceImages(source, CUDA, seed=7, repeats=1)
            (_, position), *_ = list(enumerate(micro_batches(order, RankSlice(), **STEPS)))
            with counted() as waits:
                batch = images.batch(*position)
        # The numbers of the host, in one tensor.
        assert waits == {"lift_fresh": 1}
        assert batch.images.shape == (96, 3, 8, 8)
        for tensor in (batch.images, batch.labels, batch.keys.index):
            assert tensor.device == CUDA


@pytest.mark.parametrize(
    ("options", "workers", "why"),
    [
        ({"name": "tar"}, "auto", "images are read from shards (data.source), not kept in memory"),
        ({"size": 160}, "auto", "images of 8 x 8 px are too large, above 128 px"),
        ({"erasing": 0.5}, "auto", "data.augment.erasing=0.5 works on single images"),
        ({"policy": RandAugment()}, "auto", "data.augment.policy=randaugment works on single images"),
        ({}, 3, "data.workers=3 asks for processes"),
    ],
)
def test_what_only_the_host_can_stays_there_with_the_reason(digits, options, workers, why):
    source = open_views(digits, **options)
    assert choose_place("auto", source, workers=workers, device=CUDA) == Place(False, f"auto: {why}")
    with pytest.raises(InputError, match=r"^data.augment.device=device ") as raised:
        choose_place("device", source, workers=workers, device=CUDA)
    assert why in str(raised.value)
    assert choose_place("host", source, workers=workers, device=CUDA) == Place(
        False, "data.augment.device=host"
    )


def test_images_lie_on_a_gpu_with_room_for_them_or_where_the_config_says(digits, monkeypatch, said):
    source = open_views(digits)
    reasons = []
    for free, fits in ((2**30, True), (2**20, False)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, free=free: (free, 2**31))
        place = choose_place("auto", source, workers="auto", device=CUDA)
        assert place.on_device == fits
        reasons.append(place.why)
    said("\n".join(reasons))
    # A CPU is both; nothing is gained there.
    assert choose_place("auto", source, workers="auto", device=CPU) == Place(False)
    for device in (CPU, CUDA):
        assert choose_place("device", source, workers="auto", device=device).on_device
