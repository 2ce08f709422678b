"""From a config to numbers: steps, batches and rates, and what cannot be."""

import re
from pathlib import Path

import pytest

from mae_vit.config.load import load_config
from mae_vit.config.plan import check_grouping, fit_batch, make_plan
from mae_vit.core.errors import InputError
from mae_vit.finetuning.config.pretrained import WeightsOverrides
from mae_vit.finetuning.config.schema import FinetuneConfig
from mae_vit.objectives.config import PAIRS, ContrastiveMAEConfig
from mae_vit.objectives.pretrain_config import PretrainConfig

CONFIG = Path(__file__).resolve().parents[3] / "configs" / "pretrain" / "mae_digits.yaml"
GROUPS = ContrastiveMAEConfig(name="contrastive_mae", group_size=8).grouping._asdict()
BLOCKS = "data.order=blocks"


def plan(*overrides: str, num_samples: int = 1534, world_size: int = 1):
    config = load_config(PretrainConfig, CONFIG, overrides)
    return make_plan(config, num_samples=num_samples, world_size=world_size)


@pytest.mark.parametrize(
    ("overrides", "number", "value"),
    [
        ("train.epochs=30", "total_steps", 30 * 11),
        ("train.warmup_epochs=0 train.steps=70", "total_steps", 70),
        ("train.warmup_epochs=0 train.samples=1281", "total_steps", 11),
        ("train.warmup_samples=129", "warmup_steps", 2),
        ("train.steps=5 train.warmup_steps=0", "warmup_steps", 0),
        ("checkpoint.every_epochs=2 checkpoint.every_minutes=9", "checkpoint_every_steps", 22),
        ("run.seed=0", "checkpoint_every_steps", 11),
        # Minutes alone have no steps but the last.
        ("train.steps=70 checkpoint.every_minutes=9", "checkpoint_every_steps", 70),
        ("monitor.evaluate_every_epochs=2", "evaluate_every_steps", 22),
        ("data.repeats=4", "steps_per_epoch", 11),
        ("optim.blr=1.5e-4 train.effective_batch_size=512", "lr", 1.5e-4 * 2),
    ],
)
def test_durations_become_steps_and_rates_are_per_256_samples(overrides, number, value):
    assert getattr(plan(*overrides.split()), number) == pytest.approx(value)


def test_batches_are_split_over_ranks_and_micro_batches():
    planned = plan("train.batch_size_per_device=16", world_size=2)
    assert (planned.batch_size_per_device, planned.accumulation) == (16, 4)
    assert plan(world_size=4).batch_size_per_device == 32
    assert plan("data.repeats=4", "train.batch_size_per_device=32", world_size=2).accumulation == 2
    for world_size in (1, 2, 4, 8, 16, 32):
        assert plan(BLOCKS, world_size=world_size).effective_batch_size == 128


def test_views_of_an_image_and_micro_batches_hold_whole_groups(said):
    pairs = plan("data.repeats=2")
    check_grouping(pairs, world_size=1, repeats=1, **PAIRS._asdict())
    check_grouping(
        plan("data.repeats=2", "train.batch_size_per_device=16", world_size=2), 2, repeats=2, **GROUPS
    )
    parts = plan("data.repeats=2", "train.batch_size_per_device=8", world_size=2)
    for planned, world_size, repeats, grouping in (
        *((pairs, 1, 2, PAIRS._asdict()), (plan(), 1, 1, GROUPS), (parts, 2, 2, GROUPS)),
    ):
        with pytest.raises(InputError) as error:
            check_grouping(planned, world_size, repeats=repeats, **grouping)
        said(error)


@pytest.mark.parametrize(("batch", "num_samples", "group_size"), [(128, 80, 64), (2000, 1497, 1000)])
def test_groups_of_few_images_are_smaller(batch, num_samples, group_size):
    """A batch of whole groups that is larger than the data would shrink again."""
    planned = plan(f"train.effective_batch_size={batch}", "data.repeats=2", num_samples=num_samples)
    grouping = ContrastiveMAEConfig(name="contrastive_mae", group_size=group_size).grouping
    with pytest.raises(InputError, match=r"nearest: objective.group_size=\d+\)") as error:
        check_grouping(planned, 1, repeats=2, **grouping._asdict())
    smaller = int(re.search(r"nearest: objective.group_size=(\d+)", str(error.value))[1])
    grouping = ContrastiveMAEConfig(name="contrastive_mae", group_size=smaller).grouping
    check_grouping(planned, 1, repeats=2, **grouping._asdict())


@pytest.mark.parametrize("batch", [100, 128, 192, 250])
@pytest.mark.parametrize(
    ("per_device", "world_size"), [(None, 1), (5, 2), (10, 1), (25, 2), (48, 1), (48, 2)]
)
def test_the_sizes_that_a_message_asks_for_work(batch, per_device, world_size):
    sizes = [f"train.effective_batch_size={batch}"]
    sizes += [f"train.batch_size_per_device={per_device}"] if per_device else []
    for _ in range(3):
        try:
            planned = plan(*sizes, world_size=world_size, num_samples=5000)
            check_grouping(planned, world_size=world_size, repeats=2, **GROUPS)
            return
        except InputError as error:
            asked = re.search(r"nearest: ([^),]*)", str(error))[1]
            # A plain number is of the last option that was named before it.
            named = asked if "=" in asked else f"train.batch_size_per_device={asked}"
            keys = [part.split("=")[0] for part in named.split()]
            sizes = [size for size in sizes if size.split("=")[0] not in keys] + named.split()
    pytest.fail(str(sizes))


@pytest.mark.parametrize("world_size", [1, 2, 8])
def test_a_batch_larger_than_the_data_shrinks_to_one_that_ranks_do_not_change(world_size):
    made = plan("train.effective_batch_size=4096", "optim.blr=1e-4", world_size=world_size)
    assert (made.effective_batch_size, made.steps_per_epoch) == (1024, 1)
    assert made.lr == 1e-4 * 1024 / 256
    (note,) = made.notes
    for part in ("train.effective_batch_size=4096", "data/digits", "1534", "1,024"):
        assert part in note
    # One that fits is left as it is.
    whole = plan("train.effective_batch_size=1528", world_size=world_size)
    assert (whole.effective_batch_size, whole.notes) == (1528, ())
    exact = plan("train.effective_batch_size=2048", num_samples=1024, world_size=world_size)
    assert exact.effective_batch_size == 1024
    parts = ("train.effective_batch_size=4096", "data.repeats=2", BLOCKS)
    assert plan(*parts, world_size=world_size).effective_batch_size == 1024


def test_a_batch_of_fine_tuning_shrinks_but_not_in_a_comparison():
    words = ["train.effective_batch_size=4096", "model.img_size=8", "model.in_chans=1", "model.patch_size=2"]
    path = CONFIG.parents[1] / "finetune" / "finetune_cifar_tiny.yaml"
    config = load_config(FinetuneConfig, path, words, amend=WeightsOverrides(None, path))
    assert make_plan(config, num_samples=1534, world_size=1).effective_batch_size == 1024
    assert fit_batch(config, num_samples=4096, shrinks=False) == 4096
    with pytest.raises(InputError, match="nearest: 1533"):
        fit_batch(config, num_samples=1534, world_size=3, shrinks=False)


@pytest.mark.parametrize(
    ("overrides", "world_size"),
    [
        *(("run.seed=0", 3), ("train.batch_size_per_device=48", 1)),
        (f"{BLOCKS} train.effective_batch_size=96", 6),
        (f"train.effective_batch_size=2016 {BLOCKS} data.lanes=7", 2),
        ("train.effective_batch_size=3000 data.repeats=3", 1),
        ("data.repeats=4 train.batch_size_per_device=2", 1),
        *(("train.epochs=0.01 train.warmup_epochs=0", 1), ("optim.min_lr=0.5", 1)),
        ("optim.blr=1e-4 optim.min_lr=6e-5", 1),
    ],
)
def test_impossible_plans(overrides, world_size, said):
    with pytest.raises(InputError) as caught:
        plan(*overrides.split(), world_size=world_size)
    said(caught)


@pytest.mark.parametrize(
    ("overrides", "warmup"),
    [
        *(("train.epochs=30 train.warmup_epochs=31", 33), ("train.steps=20", 2), ("train.steps=176", 17)),
        *(("train.warmup_samples=1500 train.samples=1000", 0), ("train.steps=177", 176)),
    ],
)
def test_the_warm_up_of_a_short_try_is_a_tenth_of_it(overrides, warmup, said):
    made = plan(*overrides.split(), num_samples=1497)
    assert made.warmup_steps == warmup
    for note in made.notes:
        said(note)
