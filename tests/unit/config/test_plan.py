"""From a config to numbers: steps, batches and rates, and what cannot be."""

import re
from pathlib import Path

import pytest

from mae_vit.config.batch import check_same_batch
from mae_vit.config.load import load_config
from mae_vit.config.plan import check_grouping, make_plan
from mae_vit.config.presets import find_config
from mae_vit.core.errors import InputError
from mae_vit.core.messages import count_of
from mae_vit.finetuning.config.pretrained import WeightsOverrides
from mae_vit.finetuning.config.schema import FinetuneConfig
from mae_vit.objectives.config import PAIRS, ContrastiveMAEConfig
from mae_vit.objectives.pretrain_config import PretrainConfig

CONFIG = Path(__file__).resolve().parents[3] / "configs" / "pretrain" / "mae_digits.yaml"

without_start = WeightsOverrides(None, CONFIG)


def plan(*overrides: str, num_samples: int = 1534, world_size: int = 1):
    return make_plan(
        load_config(PretrainConfig, CONFIG, overrides), num_samples=num_samples, world_size=world_size
    )


def test_durations_become_steps():
    assert plan("train.epochs=30").total_steps == 30 * 11
    assert plan("train.warmup_epochs=0", "train.steps=70").total_steps == 70
    assert plan("train.warmup_epochs=0", "train.samples=1281").total_steps == 11
    assert plan("train.warmup_epochs=2").warmup_steps == 22
    assert plan("train.warmup_steps=5").warmup_steps == 5
    assert plan("train.warmup_samples=129").warmup_steps == 2
    assert plan("checkpoint.every_steps=7").checkpoint_every_steps == 7
    assert plan("checkpoint.every_epochs=2", "checkpoint.every_minutes=9").checkpoint_every_steps == 22
    assert plan().checkpoint_every_steps == 11
    # Minutes alone have no steps but the last.
    assert plan("train.steps=70", "checkpoint.every_minutes=9").checkpoint_every_steps == 70
    assert plan("monitor.evaluate_every_epochs=2").evaluate_every_steps == 22


def test_the_warm_up_that_a_message_asks_for_works():
    assert plan("train.steps=20", "train.warmup_steps=2").warmup_steps == 2
    assert plan("train.steps=5", "train.warmup_steps=0").warmup_steps == 0


def test_repeats_leave_epochs_as_they_are_and_fill_micro_batches():
    assert plan("data.repeats=4").steps_per_epoch == plan().steps_per_epoch == 11
    assert plan("data.repeats=4", "train.batch_size_per_device=32", world_size=2).accumulation == 2
    with pytest.raises(
        InputError, match=r"data.repeats=4 does not divide micro-batches of 2 images \(nearest: "
    ):
        plan("data.repeats=4", "train.batch_size_per_device=2")


def test_views_of_one_image_are_not_mixed():
    pairs = plan("data.repeats=2")
    check_grouping(pairs, world_size=1, repeats=1, **PAIRS._asdict())
    with pytest.raises(InputError, match=r"each image comes once, and data.repeats=2 \(use data.repeats=1\)"):
        check_grouping(pairs, world_size=1, repeats=2, **PAIRS._asdict())


def test_micro_batches_hold_whole_groups():
    grouping = ContrastiveMAEConfig(name="contrastive_mae", group_size=8).grouping._asdict()
    whole = plan("data.repeats=2", "train.batch_size_per_device=16", world_size=2)
    check_grouping(whole, world_size=2, repeats=2, **grouping)
    with pytest.raises(InputError, match=r"in 2 views, and data.repeats=1 \(use data.repeats=2\)"):
        check_grouping(plan(), world_size=1, repeats=1, **grouping)
    parts = plan("data.repeats=2", "train.batch_size_per_device=8", world_size=2)
    with pytest.raises(
        InputError, match=r"no whole groups of 16 \(nearest: train.batch_size_per_device=16\)"
    ):
        check_grouping(parts, world_size=2, repeats=2, **grouping)


@pytest.mark.parametrize("batch", [100, 128, 192, 250])
@pytest.mark.parametrize("per_device", [None, 5, 10, 25, 48])
@pytest.mark.parametrize("world_size", [1, 2])
def test_the_sizes_that_a_message_asks_for_work(batch, per_device, world_size):
    grouping = ContrastiveMAEConfig(name="contrastive_mae", group_size=8).grouping._asdict()
    sizes = [f"train.effective_batch_size={batch}"]
    sizes += [f"train.batch_size_per_device={per_device}"] if per_device else []
    for _ in range(3):
        try:
            planned = plan(*sizes, world_size=world_size, num_samples=5000)
            check_grouping(planned, world_size=world_size, repeats=2, **grouping)
            return
        except InputError as error:
            asked = re.search(r"nearest: ([^),]*)", str(error))[1]
            # A plain number is of the last option that was named before it.
            named = asked if "=" in asked else f"train.batch_size_per_device={asked}"
            keys = [part.split("=")[0] for part in named.split()]
            sizes = [size for size in sizes if size.split("=")[0] not in keys] + named.split()
    pytest.fail(str(sizes))


def test_base_rate_is_per_256_samples():
    assert plan("optim.blr=1.5e-4", "train.effective_batch_size=512").lr == pytest.approx(3e-4)


def test_batches_are_split_over_ranks_and_micro_batches():
    planned = plan("train.batch_size_per_device=16", world_size=2)
    assert (planned.batch_size_per_device, planned.accumulation) == (16, 4)
    assert plan(world_size=4).batch_size_per_device == 32


@pytest.mark.parametrize("world_size", [1, 2, 4, 8, 16, 32])
def test_lanes_fit_ranks_that_divide_them_or_are_divided(world_size):
    assert plan("data.order=blocks", world_size=world_size).effective_batch_size == 128


@pytest.mark.parametrize("world_size", [1, 2, 8])
def test_a_batch_larger_than_the_data_shrinks_to_one_that_ranks_do_not_change(world_size):
    found = plan("train.effective_batch_size=4096", "optim.blr=1e-4", world_size=world_size)
    assert (found.effective_batch_size, found.steps_per_epoch) == (1024, 1)
    assert found.lr == 1e-4 * 1024 / 256
    assert found.notes == (
        'train.effective_batch_size=4096 is larger than the data: split "train" of data/digits has 1534 images to '
        "train on: a batch is 1,024 images, the largest power of two",
    )
    # One that fits is left as it is.
    whole = plan("train.effective_batch_size=1528", world_size=world_size)
    assert (whole.effective_batch_size, whole.notes) == (1528, ())
    exact = plan("train.effective_batch_size=2048", num_samples=1024, world_size=world_size)
    assert exact.effective_batch_size == 1024


def test_a_batch_that_shrinks_holds_whole_lanes_and_repeats():
    words = ("train.effective_batch_size=4096", "data.repeats=2", "data.order=blocks")
    assert plan(*words).effective_batch_size == 1024
    with pytest.raises(InputError, match="larger than the data"):
        plan("train.effective_batch_size=3000", "data.repeats=3")


def test_a_batch_of_fine_tuning_shrinks_but_not_in_a_comparison():
    words = ["train.effective_batch_size=4096", "model.img_size=8", "model.in_chans=1", "model.patch_size=2"]
    config = load_config(
        FinetuneConfig, find_config("finetune_cifar_tiny"), words, amend=without_start
    )
    found = make_plan(config, num_samples=1534, world_size=1)
    assert found.effective_batch_size == 1024
    assert "a batch is 1,024 images, the largest power of two" in found.notes[0]
    check_same_batch(config, num_samples=4096)
    with pytest.raises(InputError, match=r"larger than the data.*changes no batch \(nearest: 1533\)"):
        check_same_batch(config, num_samples=1534, world_size=3)


@pytest.mark.parametrize(
    ("overrides", "world_size", "expected"),
    [
        ([], 3, "train.effective_batch_size=128 does not divide over 3 ranks (nearest: 129)"),
        (
            ["train.batch_size_per_device=48"],
            1,
            "does not divide the 128 images of each of 1 ranks (nearest: 32)",
        ),
        (
            ["data.order=blocks", "train.effective_batch_size=96"],
            6,
            "data.lanes=8 does not fit 6 ranks: one must divide the other (nearest lanes: 6, or use 4 ranks)",
        ),
        (
            ["train.effective_batch_size=2016", "data.order=blocks", "data.lanes=7"],
            2,
            'train.effective_batch_size=2016 is larger than the data: split "train" of data/digits has 1534 images '
            "to train on (nearest: 1526)",
        ),
        (["train.epochs=0.01", "train.warmup_epochs=0"], 1, "less than one step"),
        (["optim.min_lr=0.5"], 1, "optim.min_lr=0.5 is above the peak rate optim.lr=0.001"),
        (
            ["optim.blr=1e-4", "optim.min_lr=6e-5"],
            1,
            "optim.min_lr=6e-05 is above the peak rate 5e-05 = optim.blr=0.0001 x 128 / 256",
        ),
    ],
)
def test_impossible_plans(overrides, world_size, expected):
    with pytest.raises(InputError) as caught:
        plan(*overrides, world_size=world_size)
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "warmup", "note"),
    [
        (
            ["train.epochs=30", "train.warmup_epochs=31"],
            33,
            "train.warmup_epochs=31 (341 steps) is longer than train.epochs=30 (330 steps)",
        ),
        (["train.steps=20"], 2, "train.warmup_epochs=16 (176 steps) is longer than train.steps=20"),
        (["train.steps=12"], 1, "train.warmup_epochs=16 (176 steps) is longer than train.steps=12"),
        (["train.steps=176"], 17, "train.warmup_epochs=16 (176 steps) is as long as train.steps=176"),
        (
            ["train.warmup_samples=1500", "train.samples=1000"],
            0,
            "train.warmup_samples=1500 (12 steps) is longer than train.samples=1000 (8 steps)",
        ),
        (["train.steps=177"], 176, None),
    ],
)
def test_the_warm_up_of_a_short_try_is_a_tenth_of_it(overrides, warmup, note):
    made = plan(*overrides, num_samples=1497)
    assert made.warmup_steps == warmup
    expected = () if note is None else (f"{note}: warm-up is a tenth of the run, {count_of(warmup, 'step')}",)
    assert made.notes == expected
