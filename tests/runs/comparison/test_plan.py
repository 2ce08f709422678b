"""Which runs a comparison plans: their labels and seeds, names and order."""

import json

import pytest
from helpers.comparison import plan_of

from mae_vit.comparison.report.page import settings_table
from mae_vit.config.schema import RunSection

TUNE = [{"optim.lr": 1e-3}, {"optim.lr": 2e-3}]


@pytest.mark.parametrize(
    ("mode", "file", "settings", "drawn"),
    [
        ("finetune", {}, {}, True),
        ("segment", {}, {}, True),
        ("segment_probe", {}, {}, True),
        ("knn", {}, {}, False),
        ("finetune", {}, {"finetune.holdout": 0}, False),
        ("finetune", {"finetune": {"holdout": 0}}, {}, False),
        ("finetune", {"finetune": {"holdout": 0}}, {"finetune.holdout": 0.2}, True),
        ("finetune", {"with_start": {"finetune": {"holdout": 0}}}, {}, False),
    ],
)
def test_of_all_labels_a_seed_draws_the_validation_images_where_there_are_any(
    tmp_path, mode, file, settings, drawn
):
    (tmp_path / "x.yaml").write_text(json.dumps(file))
    entries = [{"name": "given", "start": "runs/mae", "set": settings}]
    *_, cell = plan_of(tmp_path, entries, modes=[mode], seeds=[0, 4], label_draws=True).cells
    assert cell.run.overrides.get("data.label_draw") == (4 if drawn else None)


def test_settings_are_chosen_on_a_draw_of_the_table(tmp_path):
    """Weights that have seen labels leave out those of its seeds."""
    entries = [{"name": "scratch"}, {"name": "own", "seeds": [5, 6]}]
    plan = plan_of(tmp_path, entries, tune=TUNE, seeds=[3, 4], label_draws=True)
    tuning = [run for run in plan.runs if run.name.startswith("tune")]
    assert [run.overrides["data.label_draw"] for run in tuning] == [3, 3, 5, 5]
    assert {run.overrides["run.seed"] for run in tuning} == {1000}


@pytest.mark.parametrize(
    ("labels", "settings", "expected"),
    [(100, {}, [100]), ("all", {}, None), (100, {"finetune.shots": [5]}, [5])],
)
def test_few_shot_cells_take_all_their_labels_in_one_draw(tmp_path, labels, settings, expected):
    entries = [{"name": "scratch", "set": settings}]
    (cell,) = plan_of(tmp_path, entries, modes=["few_shot"], labels_per_class=[labels], seeds=[0]).cells
    assert cell.run.overrides["finetune.draws"] == 1
    assert cell.run.overrides.get("finetune.shots") == expected


@pytest.mark.parametrize(
    ("mode", "labels", "seeds"),
    [
        ("linear_probe", 100, 3),
        ("few_shot", "all", 3),
        ("few_shot", 100, 1),
        ("knn", 100, 1),
    ],
)
def test_what_no_seed_changes_is_measured_once(tmp_path, mode, labels, seeds):
    entries = [{"name": "scratch"}, {"name": "given", "start": "x.safetensors"}]
    plan = plan_of(tmp_path, entries, modes=[mode], labels_per_class=[labels], seeds=[3, 4, 5])
    # Weights from scratch are drawn.
    expected = [("scratch", seed) for seed in (3, 4, 5)] + [("given", seed) for seed in (3, 4, 5)[:seeds]]
    assert [(cell.entry.name, cell.seed) for cell in plan.cells] == expected


def test_names_of_any_letters_are_folders_and_names_of_runs(tmp_path):
    names = ["ViT-Ti, 2 % (a)", "Größe S", "Grüße S", "从头训练", "微调", "***"]
    pretrain = {"预训练": {"config": "y.yaml"}}
    plan = plan_of(tmp_path, [{"name": name} for name in names], pretrain=pretrain, seeds=[0])
    folders = [run.folder.parent.name for run in plan.runs]
    assert folders[1] == "vit-ti-2-a"
    assert len(set(folders)) == 7
    named = [run.command()[-1].removeprefix("run.name=") for run in plan.runs]
    for name in folders + named:
        RunSection(name=name)
    assert named[1] == "vit-ti-2-a-all-labels-finetune-seed-0"


def test_runs_are_planned_behind_those_that_they_need(tmp_path):
    entries = [
        {"name": "longer", "compute_of": "given"},
        {"name": "scratch"},
        {"name": "given", "start": "MAE"},
        {"name": "knn", "start": "MAE", "modes": ["knn"]},
    ]
    pretrain = {"MAE": {"config": "y.yaml"}}
    plan = plan_of(tmp_path, entries, tune=TUNE, pretrain=pretrain, reference="scratch", seeds=[0])
    runs = {run.name: run for run in plan.runs}
    short = [tuple(name.split(", ")[::2]) for name in runs]
    assert short[0] == ("pretrain MAE",)
    assert short[1:5] == [(f"tune {row}", f"setting {n}") for row in ("scratch", "given") for n in (0, 1)]
    modes = {"scratch": "finetune", "given": "finetune", "knn": "knn", "longer": "finetune"}
    assert short[5:] == [("longer", "finetune"), *(each for each in modes.items() if each[0] != "longer")]
    longer, *_, knn = list(runs.values())[5:]
    assert [run.name for run in knn.needs] == ["pretrain MAE"]
    needs = [run.name.partition(",")[0] for run in longer.needs]
    assert needs == ["tune scratch", "tune scratch", "given", "scratch"]
    # All are among the runs: nothing waits for what nobody runs.
    assert all(need in runs.values() for run in runs.values() for need in run.needs)


def test_the_settings_of_equal_compute_are_in_the_report(tmp_path):
    entries = [
        {"name": "longer", "compute_of": "given"},
        {"name": "scratch"},
        {"name": "given", "start": "MAE"},
    ]
    pretrain = {"MAE": {"config": "y.yaml"}}
    plan = plan_of(tmp_path, entries, tune=TUNE[1:], pretrain=pretrain, reference="scratch", seeds=[0])
    settings = {row[0]: row[2] for row in settings_table(plan).body}
    assert settings["longer"].endswith(", optim.lr=0.002, as much compute as given")
