"""A whole comparison on the digits: its table, its page, its files, and what a second call of it does."""

import json
import re
import shutil
from dataclasses import replace

import pytest
from helpers.commands import run
from helpers.comparison import compare_command, equal_compute_plan, read_rows, write_config

from mae_vit.comparison.command import main
from mae_vit.comparison.config import CompareConfig
from mae_vit.comparison.plan import ComparisonPlan
from mae_vit.comparison.report import rows
from mae_vit.config.load import load_config
from mae_vit.config.typed_yaml import parse_yaml


@pytest.fixture(scope="module")
def compared(digits, tmp_path_factory):
    folder = tmp_path_factory.mktemp("compared")
    config = write_config(folder, digits, steps=6, as_long=False)
    done = run(*compare_command(config, folder / "run"), timeout=500)
    assert done.returncode == 0, done.stderr
    return config, folder / "run", done


def test_the_table_tells_what_the_runs_found(compared):
    _, folder, done = compared
    lines = read_rows(folder)
    assert [(line["entry"], line["mode"]) for line in lines] == [
        ("ViT from scratch", "finetune"),
        ("ViT from MAE", "finetune"),
        ("ViT from MAE", "few_shot"),
        ("SimpleCNN", "finetune"),
    ]
    assert str(folder / "report.html") in done.stdout
    tuned = [line for line in lines if line["mode"] == "finetune"]
    best = max(tuned, key=lambda line: float(line["val_top1"]))
    assert f"next      mae-vit predict {folder / best['run']} IMAGES" in done.stdout
    for line in lines[:2]:
        run_summary = json.loads((folder / line["run"] / "summary.json").read_text())
        assert float(line["test_top1"]) == run_summary["test_top1"]
        assert (run_summary["train_size"], run_summary["val_size"], run_summary["test_size"]) == (
            220,
            30,
            300,
        )


def test_without_validation_images_no_run_is_proposed(compared, tmp_path):
    config, folder, _ = compared
    copy = shutil.copytree(folder, tmp_path / "copy")
    for path in [*copy.rglob("summary.json"), *copy.rglob("results.json")]:
        path.write_text(json.dumps(json.loads(path.read_text()) | {"val_top1": None}))
    done = run(*compare_command(config, copy), "--report")
    assert (done.returncode, "next" in done.stdout) == (0, False), done.stderr


def test_settings_are_chosen_on_held_out_images_alone(compared):
    _, folder, _ = compared
    runs = {line["entry"]: folder / line["run"] for line in read_rows(folder) if line["mode"] == "finetune"}
    for entry, cell in runs.items():
        scores = {}
        for tuning in cell.parent.iterdir():
            config = parse_yaml((tuning / "config.yaml").read_text(), "")
            if not config["finetune"]["test"]:
                assert not (tuning / "predictions.csv").exists()
                summary = json.loads((tuning / "summary.json").read_text())
                assert "test_top1" not in summary
                scores[config["optim"]["lr"]] = summary["val_top1"]
        assert set(scores) == ({2e-3, 4e-3} if entry == "SimpleCNN" else {1e-3, 3e-3})
        chosen = parse_yaml((cell / "config.yaml").read_text(), "")["optim"]["lr"]
        assert scores[chosen] == max(scores.values())


def test_the_page_needs_nothing_beside_it(compared):
    _, folder, _ = compared
    page = (folder / "report.html").read_text()
    assert not re.search(r'(src|href)="(?!data:|#)', page.replace('xlink:href="#', 'href="#'))
    assert "ViT from MAE" in page
    assert page.count("<svg") >= 2
    assert "With 250 labels" in page
    assert "(300, split test)" in page
    # In the table, and set against each of the others.
    results, _, settings = (folder / "report.md").read_text().partition("\n## Settings\n")
    assert results.count("\n| ViT from scratch | ") == 2
    # Both that were tried, with their scores.
    tried = re.findall(
        r"\n\| ViT from scratch \| 25 \| config=.*, optim.lr=(0.00\d) \| [0-9.]+ \| (\w*) \|", settings
    )
    assert [rate for rate, _ in tried] == ["0.001", "0.003"]
    assert sorted(chosen for _, chosen in tried) == ["", "chosen"]
    assert "Each against each" in page


def test_again_it_has_nothing_to_do(compared):
    config, folder, _ = compared
    before = (folder / "results.csv").read_bytes(), (folder / "report.html").read_bytes()
    logs = {path: path.stat().st_mtime_ns for path in folder.rglob("*.log")}
    assert len(logs) == 11
    assert main(compare_command(config, folder)[1:]) == 0
    assert ((folder / "results.csv").read_bytes(), (folder / "report.html").read_bytes()) == before
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*.log")} == logs


def test_other_settings_are_other_runs_beside_those_that_are_done(compared, capsys):
    config, folder, _ = compared
    before = (folder / "results.csv").read_bytes()
    changed = config.with_name("changed.yaml")
    changed.write_text(config.read_text().replace("effective_batch_size: 32", "effective_batch_size: 16"))
    assert main([*compare_command(changed, folder)[1:], "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    # Of 3 rows: 1 pretraining, 6 tuning runs, 4 cells. The pretraining has settings of its own.
    done = [re.findall(r"(\d+) runs?, (\d+) done", line) for line in lines]
    assert [("11", "1")] in done
    assert any(line.startswith("pretrain MAE: ") and "1 done" in line for line in lines)
    (row,) = [number for number, line in enumerate(lines) if line == "  ViT from MAE"]
    assert any("few_shot, seed 0:" in line for line in lines[row:])
    assert main([*compare_command(config, folder)[1:], "--dry-run"]) == 0
    assert "11 runs, 11 done" in capsys.readouterr().out
    assert main([*compare_command(changed, folder)[1:], "--report"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert (folder / "results.csv").read_bytes() == before


def test_a_row_says_what_it_was_made_of(compared):
    _, folder, _ = compared
    lines = read_rows(folder)
    for name in ("torch", "hardware", "precision", "data", "test_data", "train_images"):
        assert all(line[name] for line in lines), name
    tuned = [line for line in lines if line["mode"] == "finetune"]
    assert len({line["train_images"] for line in tuned}) == 1, "the same labels in every row"
    assert {line["test_reads"] for line in tuned} == {"1"}


def test_labels_of_few_shots_are_counted(compared):
    config, folder, _ = compared
    plan = ComparisonPlan(load_config(CompareConfig, config), config.parent, folder)
    by_mode = {row.cell.mode: row for row in rows.read_rows(plan)}
    assert {mode: row.size for mode, row in by_mode.items()} == {"finetune": 250, "few_shot": 250}
    few = by_mode["few_shot"]
    assert replace(few, values=few.values | {"train_size": 240}).size == 240, "a class has fewer"


def test_an_equal_compute_run_begins_early_and_is_reported_before_the_others_end(digits, tmp_path):
    plan = equal_compute_plan(tmp_path, digits)
    command = compare_command(tmp_path / "small.yaml", plan.folder)
    done = run(*command, timeout=500)
    assert done.returncode == 0, done.stderr
    assert done.stderr.index("begins  as long as MAE") < done.stderr.index("ends    pretrain MAE")
    longer = next(one for one in plan.runs if one.equal_compute)
    assert longer.determined() == {"train.steps": longer.summary["total_steps"]}
    (plan.folder / "vit-from-mae").rename(tmp_path / "away")
    assert main([*command[1:], "--report"]) == 0
    assert [line["entry"] for line in read_rows(plan.folder)] == ["ViT from scratch", "as long as MAE"]
