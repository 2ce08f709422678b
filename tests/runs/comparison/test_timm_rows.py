"""Rows of third-party encoders: with their own size and pooling, and marked in every table."""

import pytest
from helpers.commands import ROOT
from helpers.weights.backbones import write_backbone, write_named

from mae_vit.comparison.config import CompareConfig
from mae_vit.comparison.inputs import Inputs, digest_of_weights
from mae_vit.comparison.main import check
from mae_vit.comparison.plan import ComparisonPlan
from mae_vit.config.load import load_config
from mae_vit.core.errors import InputError
from mae_vit.models.encoder_file import cost_of_weights


def plan_with(folder, entry: dict, **shared) -> ComparisonPlan:
    content = {"run": {"name": "x"}, "data": {"path": "data"}, "set": shared, "reference": "it"}
    entries = [{"name": "it", "config": "linear_probe_cifar_tiny", **entry}]
    config = CompareConfig.model_validate({**content, "modes": ["knn"], "entries": entries})
    return ComparisonPlan(config, folder, folder / "out")


def test_it_keeps_its_own_size_and_pooling_whatever_all_rows_are_given(tmp_path):
    start = str(write_backbone(tmp_path / "dinov2", "dinov2"))
    shared = {"model.img_size": 8, "model.in_chans": 1, "finetune.pool": "mean", "finetune.neighbors": 5}
    plan = plan_with(tmp_path, {"start": start}, **shared)
    check(plan)
    (cell,) = plan.cells
    assert "finetune.neighbors=5" in cell.run.command()
    assert not [word for word in cell.run.command() if word.startswith(("model.", "finetune.pool"))]
    assert cell.fixed  # no seed makes a difference
    cost = cost_of_weights(cell.run.weights)
    assert (cost.images_seen, cost.flops) == (None, None)
    (cell,) = plan_with(tmp_path, {"start": start, "set": {"model.img_size": 42}}, **shared).cells
    assert "model.img_size=42" in cell.run.command()
    entry = {"start": write_named("test_vit2", tmp_path), "modes": ["finetune"]}
    trained = plan_with(tmp_path, {**entry, "config": "finetune_cifar_tiny"}, **{"model.img_size": 8})
    assert not [word for word in trained.cells[0].run.command() if word.startswith("model.")]
    check(trained)


def test_a_network_of_our_kind_takes_the_shared_size(tmp_path):
    plan = plan_with(tmp_path, {"start": write_named("test_vit", tmp_path)}, **{"model.img_size": 32})
    assert "model.img_size=32" in plan.cells[0].run.command()


def test_a_published_encoder_joins_the_comparison_of_photographs(tmp_path):
    path = ROOT / "configs" / "compare" / "compare_photos.yaml"
    start = str(write_backbone(tmp_path / "dinov2", "dinov2"))
    config = load_config(CompareConfig, path, [f"published={start}"])
    plan = ComparisonPlan(config, path.parent, tmp_path / "out")
    check(plan)
    runs = [cell.run for cell in plan.cells if cell.entry.start == start]
    assert len(runs) == 3
    assert {(run.overrides["finetune.mode"], run.overrides["model.img_size"]) for run in runs} == {
        ("few_shot", 224)
    }
    assert load_config(CompareConfig, path).entries == config.entries[:-1]
    named = load_config(CompareConfig, path, ["published=timm:NAME"])
    assert named.entries[-1].start == "timm:NAME"
    with pytest.raises(InputError, match="published"):
        load_config(CompareConfig, path.with_name("compare_demo.yaml"), ["published=timm:NAME"])


def test_other_weights_in_its_file_are_other_inputs(tmp_path):
    names = [str(name) for name in (write_backbone(tmp_path / "clip", "clip"), "timm:convnext_tiny")]
    before = [digest_of_weights(name) for name in names]
    write_backbone(tmp_path / "clip", "clip", seed=1)
    after = [digest_of_weights(name) for name in names]
    assert before[0] != after[0]
    assert before[1] is after[1] is None


def test_a_report_knows_weights_of_timm_that_are_gone():
    assert Inputs({"weights gone": "@digest of timm"}).are_of_timm("gone")
    assert not Inputs({"weights gone": "@digest"}).are_of_timm("gone")
