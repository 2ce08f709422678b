"""The file of a comparison: its options, steps of equal compute, and one line for what is wrong."""

import json
import re
from dataclasses import replace

import pytest
from helpers.commands import ROOT, one_line
from helpers.comparison import TINY_MODEL, compare_command, equal_compute_plan, plan_of, write_config
from helpers.encoders import encoder_file

from mae_vit.comparison.command import main
from mae_vit.comparison.config import CompareConfig, EntrySection
from mae_vit.comparison.foresee import foresee_runs
from mae_vit.comparison.main import check
from mae_vit.comparison.plan import ComparisonPlan, settings_with_start
from mae_vit.config.load import load_config
from mae_vit.config.presets import find_config
from mae_vit.config.typed_yaml import parse_yaml
from mae_vit.core.errors import InputError
from mae_vit.finetuning.config.pretrained import WeightsOverrides
from mae_vit.finetuning.config.schema import FinetuneConfig

# What is changed in the file, and to what.
WRONG = [
    ("reference: ViT from scratch", "reference: ViT from scrach"),
    ("  train.steps:", "  run.seed: 3\n  train.steps:"),
    ("  train.steps:", "  finetune.draws: 5\n  train.steps:"),
    ("[{optim.lr: 2e-3}, {optim.lr: 4e-3}]", "[{optim.lr: 2e-3}]"),
    ("  model.img_size: 8\n", "  model.img_sise: 8\n"),
    ("compute_of: ViT from MAE", "compute_of: ViT from MAE, modes: [finetune, few_shot]"),
    ("monitor.tensorboard: false,", 'monitor.tensorboard: false, model.init: "timm:vit_tiny_patch16_224",'),
    ("parallel: 2", "parallel: 2\nmodes: [finetune, knn]"),
    ("data: {path: ", "data: {path: no"),
    ("labels_per_class: [25]", "labels_per_class: [100000]"),
    ("config: simple_cnn_cifar.yaml", "config: configs/finetune/simple_cnn_cifar.yaml"),
    ("modes: [finetune, few_shot]}", "seeds: [1000]}"),
    ("name: SimpleCNN", "name: ViT-from scratch"),
    ("labels_per_class: [25]", "labels_per_class: [25, 25]"),
    ("modes: [finetune, few_shot]}", "seeds: [0, 1, 0]}"),
    ("  MAE:\n", "  two: {config: mae_digits.yaml, dir: runs/a}\n  MAE:\n    dir: ./runs/a\n"),
    ("  train.steps:", "  finetune.holdout: 0\n  train.steps:"),
    ("monitor.tensorboard: false,", "monitor.tensorboard: false, train.batch_size_per_device: 7,"),
    ("compute_of: ViT from MAE", "compute_of: ViT from MAE, tune: [{optim.lr: 1e-3}, {optim.lr: 2e-3}]"),
]


def test_one_option_of_a_comparison_is_changed_by_its_dotted_name(digits, tmp_path):
    path = write_config(tmp_path, digits, steps=2)
    before = load_config(CompareConfig, path)
    words = [
        "set.train.epochs=3",
        "set.data.augment.flip=true",
        "set.train.warmup_epochs=null",
        "pretrain.MAE.set.train.steps=5",
    ]
    changed = load_config(CompareConfig, path, [*words, "pretrain.MAE.set.train.engine=null"])
    # null unsets it in the runs too, and takes nothing with it.
    more = {"train.epochs": 3, "data.augment.flip": True, "train.warmup_epochs": None}
    expected = {**before.set, **more}
    del expected["train.steps"]  # another way of giving the same
    assert changed.set == expected
    settings = {**before.pretrain["MAE"].set, "train.steps": 5}
    del settings["train.engine"]
    assert changed.pretrain["MAE"].set == settings


@pytest.mark.parametrize(
    "key",
    [
        *("train.epoch", "epochs", "data.augment.flip", "objective.mask_ratio", "pretrain.MAE.epochs"),
        # Keys of its own.
        *("seed", "finetune.mode", "data.pth", "pretrain.MAE.dri"),
    ],
)
def test_a_key_of_the_runs_is_named_as_the_comparison_has_it(key, said):
    with pytest.raises(InputError) as error:
        load_config(CompareConfig, find_config("compare_demo"), [f"{key}=3"])
    said(error)


def test_what_a_row_sets_wins_over_another_key_for_the_same(tmp_path):
    shared = {"train.epochs": 30, "train.warmup_epochs": 5, "optim.blr": 1e-3}
    entry = {"name": "x", "set": {"train.steps": 100, "optim.lr": 1e-3}}
    plan = plan_of(tmp_path, [entry], set=shared)
    expected = {"train.warmup_epochs": 5, **entry["set"], "data.path": plan.config.data.path}
    assert plan.entry_settings(plan.config.entries[0]) == expected


def test_what_a_comparison_sets_wins_over_with_start(tmp_path):
    recipe = {
        "optim": {"blr": 1e-3, "layer_decay": 0.8},
        "train": {"epochs": 5},
        "data": {"augment": {"crop": "none"}},
    }
    (tmp_path / "x.yaml").write_text(json.dumps({"with_start": recipe}))
    entry = EntrySection(name="x", config="x.yaml", start="runs/mae", set={"train.steps": 100})

    def settings(mode="finetune", overridden=()):
        return settings_with_start(tmp_path / "x.yaml", entry, mode, overridden)

    assert settings() == {
        "optim.blr": 1e-3,
        "optim.layer_decay": 0.8,
        "train.epochs": 5,
        "data.augment": {"crop": "none"},
    }
    assert settings(overridden=["optim.lr", "train.steps", "data.augment.crop"]) == {"optim.layer_decay": 0.8}
    assert "optim.layer_decay" not in settings("linear_probe")
    assert settings("few_shot") == {}


@pytest.mark.parametrize(
    "content", [None, "", "with_start: [1]\n", "with_start: {optim: }\n", "a: [\n", b"\xff"]
)
def test_a_report_needs_no_config(tmp_path, content):
    """Where reports are written the configs may be gone, or others."""
    path = tmp_path / "x.yaml"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    entry = EntrySection(name="x", config="x.yaml", start="runs/mae")
    assert settings_with_start(path, entry, "finetune", ()) == {}


@pytest.mark.parametrize("content", ["[1]", "{optim: }"])
def test_a_malformed_with_start_is_named_before_anything_runs(tmp_path, content):
    path = tmp_path / "x.yaml"
    path.write_text(
        (ROOT / "configs/finetune/finetune_cifar_tiny.yaml").read_text().partition("with_start:")[0]
    )
    path.write_text(path.read_text() + f"with_start: {content}\n")
    with pytest.raises(InputError, match="with_start"):
        load_config(FinetuneConfig, path, [], amend=WeightsOverrides(None, path))


@pytest.mark.parametrize("name", ["Mae", "DINOv2"])
def test_a_pretraining_run_that_is_not_in_the_file_is_named_with_the_one_that_is(name, said):
    with pytest.raises(InputError) as error:
        load_config(CompareConfig, find_config("compare_demo"), [f"pretrain.{name}.set.train.epochs=3"])
    said(error)


def test_equal_compute_is_counted_in_steps(digits, tmp_path):
    """100 of pretraining and 6 x 7 of fine-tuning, at 10 a step: 15 steps."""
    plan = equal_compute_plan(tmp_path, digits)
    runs = {cell.entry.name: cell.run for cell in plan.cells}
    longer = runs["as long as MAE"]
    assert longer.needs == (runs["ViT from MAE"], runs["ViT from scratch"])
    assert [run.name for run in foresee_runs(plan) if run.steps] == [longer.name]
    with pytest.raises(InputError, match="not known"):
        longer.command()
    summaries = {
        "ViT from MAE": {"steps": 6, "flops_per_step": 7.0},
        "ViT from scratch": {"flops_per_step": 10.0},
    }
    for name, summary in summaries.items():
        runs[name].folder.mkdir(parents=True)
        (runs[name].folder / "summary.json").write_text(json.dumps(summary))
    encoder_file(plan.pretraining["MAE"].folder / "encoder.safetensors", flops=100.0)
    assert "train.steps=15" in longer.command()
    early = replace(longer, steps=15)
    assert (early.needs, early.id, early.command()) == ((), longer.id, longer.command())


def test_the_foreseen_length_has_the_cost_of_the_weights_that_pretraining_begins_from(digits, tmp_path):
    section = parse_yaml(write_config(tmp_path, digits, steps=6).read_text(), "")["pretrain"]["MAE"]
    size = {"img_size": (8, 8), "patch_size": 2, "in_chans": 1, "embed_dim": 16, "num_heads": 2}
    costs = []
    for flops in (0.0, 1e12):
        weights = encoder_file(tmp_path / f"{flops}.safetensors", **size, flops=flops)
        init = section | {"set": section["set"] | {"model.init": str(weights)}}
        plan = equal_compute_plan(tmp_path, digits, pretrain={"MAE": init})
        costs += [run.steps for run in foresee_runs(plan) if run.equal_compute]
    assert costs[1] > costs[0]
    assert len(costs) == 2


def test_an_equal_compute_run_has_its_own_length_beside_a_setting_of_another(digits, tmp_path):
    plan = equal_compute_plan(tmp_path, digits, tune=[{"train.epochs": 9}])
    run = replace(next(run for run in plan.runs if run.equal_compute), steps=15)
    lengths = [word for word in run.command() if word.startswith(("train.epochs", "train.steps"))]
    assert lengths == ["train.steps=15"]


def test_the_length_of_a_run_whose_settings_are_not_chosen_yet_is_not_foreseen(digits, tmp_path):
    path = write_config(tmp_path, digits, steps=6)
    plan = ComparisonPlan(load_config(CompareConfig, path), tmp_path, tmp_path / "run")
    (usual,) = {run.equal_compute[1].name for run in plan.runs if run.equal_compute}
    foreseen = foresee_runs(plan)
    assert not any(run.steps for run in foreseen)
    # The row of equal compute is long, the tries of its settings are as long as the usual row.
    flops = {run.name: run.flops for run in foreseen}
    tries = {flops[one.name] for run in plan.runs if run.name == usual for one in run.choice.runs}
    assert tries == {flops[usual]}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("finetune.start", "runs/mae"), ("finetune.test", False)),
        *(("data.labels_per_class", 5), ("data.label_draw", 2)),
    ],
)
def test_what_tells_rows_apart_is_not_in_their_files(tmp_path, key, value, said):
    """As in the config that a finished run leaves."""
    section, _, name = key.partition(".")
    (tmp_path / "x.yaml").write_text(json.dumps({section: {name: value}}))
    with pytest.raises(InputError) as error:
        check(plan_of(tmp_path))
    said(error)


@pytest.mark.parametrize(("old", "new"), WRONG)
def test_bad_input_is_one_line(digits, tmp_path, capsys, old, new, said):
    config = write_config(tmp_path, digits, steps=2)
    assert old in config.read_text()
    config.write_text(config.read_text().replace(old, new, 1))
    assert main(compare_command(config, tmp_path / "run")[1:]) == 2
    said(one_line(capsys))
    assert not (tmp_path / "run").exists()


def test_a_setting_to_choose_replaces_another_key_of_the_same_meaning(digits, tmp_path):
    config = write_config(tmp_path, digits, steps=2, as_long=False)
    row = "  - {name: one, config: finetune_cifar_tiny.yaml, tune: [{optim.blr: 0.1}, {optim.blr: 1.0}], "
    row += f"set: {{{TINY_MODEL}, optim.lr: 1.0}}}}\n"
    config.write_text(config.read_text().replace("reference:", f"{row}reference:"))
    assert main([*compare_command(config, tmp_path / "run")[1:], "--dry-run"]) == 0


@pytest.mark.parametrize(
    "more", ["", "start: MAE, ", "tune: [{optim.lr: 0.1}, {train.effective_batch_size: 1024}], "]
)
def test_a_run_that_will_not_begin_is_said_before_the_first(digits, tmp_path, capsys, more):
    """Only the images tell. A comparison does not shrink its batch."""
    config = write_config(tmp_path, digits, steps=2, as_long=False)
    settings = f"{TINY_MODEL}, train.effective_batch_size: {32 if 'tune' in more else 1024}"
    row = f"  - {{name: large, config: finetune_cifar_tiny.yaml, {more}set: {{{settings}}}}}\n"
    config.write_text(config.read_text().replace("reference:", f"{row}reference:"))
    for words in (["--dry-run"], []):
        assert not (tmp_path / "run").exists()
        assert main([*compare_command(config, tmp_path / "run")[1:], *words]) == 2
        line = one_line(capsys)
        assert re.search("error: (tune )?large, .*: train.effective_batch_size=1024 is larger", line)
    assert not list((tmp_path / "run").rglob("output.log"))
