"""Configs that are shipped: valid, with a header; what all keys have in common: help, dumps, defaults."""

from pathlib import Path

import pytest
from helpers.commands import ROOT

from mae_vit.comparison.config import CompareConfig
from mae_vit.comparison.main import check
from mae_vit.comparison.plan import ComparisonPlan
from mae_vit.config.load import load_config
from mae_vit.config.plan import make_plan
from mae_vit.finetuning.config.pretrained import WeightsOverrides
from mae_vit.finetuning.config.schema import FinetuneConfig
from mae_vit.objectives.pretrain_config import PretrainConfig

CONFIG = ROOT / "configs" / "pretrain" / "mae_digits.yaml"


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*/*.yaml")), ids=lambda path: path.stem)
def test_shipped_configs_are_valid_and_say_how_to_use_them(path):
    if path.stem.startswith(("compare_", "study_")):
        config = load_config(CompareConfig, path)
        check(ComparisonPlan(config, path.parent, Path("runs")))
    elif "\nfinetune:" in path.read_text():
        load_config(FinetuneConfig, path, amend=WeightsOverrides(None, path))
    else:
        load_config(PretrainConfig, path)
    header = path.read_text().split("\n\n")[0]
    for word in ("Command:", "Hardware:", "Time:", "Result:", "Follows:"):
        assert word in header, f"{path.name} lacks {word}"


PHOTOS = sorted((ROOT / "configs").glob("*/*_photos_*.yaml"))


@pytest.mark.parametrize("path", PHOTOS, ids=lambda path: path.stem)
@pytest.mark.parametrize("images", [1_000, 5_000, 100_000])
def test_presets_for_photographs_have_a_sensible_length(path, images):
    """For any number of images, without another override than the path."""
    finetunes = path.parent.name == "finetune"
    changes = {"amend": WeightsOverrides(None, path)} if finetunes else {}
    config = load_config(
        FinetuneConfig if finetunes else PretrainConfig, path, ["data.path=photos"], **changes
    )
    plan = make_plan(config, num_samples=images, world_size=1)
    assert plan.notes == ()
    assert plan.total_steps >= max(1_500, plan.steps_per_epoch)
    # Pretraining takes as many steps for few images as for many.
    assert finetunes or plan.total_steps in (6_000, 20_000)
    assert plan.evaluate_every_steps < plan.total_steps


def test_a_null_in_set_is_for_the_runs():
    path = ROOT / "configs" / "compare" / "compare_demo.yaml"
    config = load_config(CompareConfig, path, ["set.optim=null", "pretrain.MAE.set.objective=null"])
    assert (config.set["optim"], config.pretrain["MAE"].set["objective"]) == (None, None)


def test_options_of_blocks_have_values_only_there():
    data = load_config(PretrainConfig, CONFIG).data
    assert (data.order, data.lanes, data.block_shards) == ("global", None, None)
    data = load_config(PretrainConfig, CONFIG, ["data.order=blocks", "data.block_shards=2"]).data
    assert (data.order, data.lanes, data.block_shards) == ("blocks", 8, 2)


def test_each_optimizer_has_its_own_defaults():
    def optim(*overrides: str):
        return load_config(
            PretrainConfig, CONFIG, ["optim.betas=null", "optim.weight_decay=null", *overrides]
        ).optim

    assert (optim().betas, optim().weight_decay) == ([0.9, 0.95], 0.05)
    assert optim("optim.name=adam").options_of("name") == {"betas": [0.9, 0.999], "weight_decay": 0}
    assert optim("optim.name=sgd").options_of("name") == {"momentum": 0.9, "weight_decay": 0}
    lars = optim("optim.name=lars", "optim.momentum=0.5")
    assert lars.options_of("name") == {"momentum": 0.5, "weight_decay": 0}
    assert lars.betas is None
