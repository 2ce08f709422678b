"""A whole comparison on the digits: its table, its page, its files, and what a second call of it does."""

import json
import re
import shutil

import pytest
from helpers.commands import run
from helpers.comparison import compare_command, read_rows, write_config

from mae_vit.config.load import load_config
from mae_vit.finetuning.comparison.command import main
from mae_vit.finetuning.comparison.config import CompareConfig
from mae_vit.finetuning.comparison.protocol import describe_changes, keep_protocol
from mae_vit.finetuning.comparison.report.predictions import read_scores
from mae_vit.finetuning.comparison.report.significance import gap_between


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
    for line in lines[:2]:
        entry = line["entry"].lower().replace(" ", "-")
        (summary,) = (folder / "cells" / entry).glob("finetune-*/summary.json")
        run_summary = json.loads(summary.read_text())
        assert float(line["test_top1"]) == run_summary["test_top1"]
        assert (run_summary["train_size"], run_summary["val_size"], run_summary["test_size"]) == (
            220,
            30,
            300,
        )


def test_settings_are_chosen_on_held_out_images_alone(compared):
    _, folder, _ = compared
    for entry, rates in {"vit-from-scratch": (1e-3, 3e-3), "simplecnn": (2e-3, 4e-3)}.items():
        summaries = [
            json.loads(
                (folder / "tune" / entry / f"labels-25-setting-{n}-seed-1000/summary.json").read_text()
            )
            for n in range(2)
        ]
        assert all("test_top1" not in one for one in summaries)
        assert not list((folder / "tune").rglob("predictions.csv"))
        best = max(range(2), key=lambda number: summaries[number]["val_top1"])
        (cell,) = (folder / "cells" / entry).glob("finetune-*/config.yaml")
        assert f"lr: {rates[best]}" in cell.read_text()


def test_the_page_needs_nothing_beside_it(compared):
    _, folder, _ = compared
    page = (folder / "report.html").read_text()
    # But for a link to more, which lies beside it.
    link = '<a href="inspect/index.html">'
    assert page.count(link) == 1
    assert "Mean attention distance" in (folder / "inspect" / "index.html").read_text()
    page = page.replace(link, "")
    assert not re.search(r'(src|href)="(?!data:|#)', page.replace('xlink:href="#', 'href="#'))
    assert "ViT from MAE" in page
    assert page.count("<svg") >= 2
    assert re.search(r"On 250 labeled images, ViT from scratch reaches [0-9.]+ % of 300 test images", page)
    assert "on the test images (300, split test)" in page
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


def test_again_it_has_nothing_to_do(compared, capsys):
    config, folder, _ = compared
    before = (folder / "results.csv").read_bytes(), (folder / "report.html").read_bytes()
    logs = {path: path.stat().st_mtime_ns for path in folder.rglob("*.log")}
    assert main(compare_command(config, folder)[1:]) == 0
    assert ((folder / "results.csv").read_bytes(), (folder / "report.html").read_bytes()) == before
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*.log")} == logs


def test_other_settings_in_the_same_folder_are_refused(compared, capsys):
    config, folder, _ = compared
    before = (folder / "results.csv").read_bytes()
    changed = config.with_name("changed.yaml")
    changed.write_text(config.read_text().replace("effective_batch_size: 32", "effective_batch_size: 16"))
    assert main(compare_command(changed, folder)[1:]) == 2
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert "was run with another set of options" in line
    assert "(then train.effective_batch_size=32, now train.effective_batch_size=16)" in line
    assert (folder / "results.csv").read_bytes() == before


def test_gaps_are_computed_again_from_the_published_files(compared):
    """`results.csv` and `predictions.npz` give every gap that `report.md` prints."""
    _, folder, _ = compared
    scores = read_scores(folder)
    reference = scores["ViT from scratch", "25", "finetune"]
    results = (folder / "report.md").read_text().partition("\n## Settings\n")[0]
    lines = [line.split(" | ") for line in results.splitlines()]
    printed = {line[0].removeprefix("| "): line for line in lines if len(line) > 4}
    column = printed["entry"].index("gap, points")
    for entry in ("ViT from MAE", "SimpleCNN"):
        gap = gap_between(scores[entry, "25", "finetune"], reference)
        assert any(line[column] == gap.in_brackets() for line in lines if line[0] == f"| {entry}")
    by_cell = {(line["entry"], line["mode"]): float(line["test_top1"]) for line in read_rows(folder)}
    for (entry, _, mode), runs in scores.items():
        assert runs[0].correct.mean() == pytest.approx(by_cell[entry, mode])


def test_a_row_says_what_it_was_made_of(compared):
    _, folder, _ = compared
    lines = read_rows(folder)
    for name in ("torch", "hardware", "precision", "data", "test_data", "train_images"):
        assert all(line[name] for line in lines), name
    tuned = [line for line in lines if line["mode"] == "finetune"]
    assert len({line["train_images"] for line in tuned}) == 1, "the same labels in every row"
    assert {line["test_reads"] for line in tuned} == {"1"}


def test_settings_that_change_after_test_results_are_reported(compared, tmp_path):
    config, folder, _ = compared
    shutil.copytree(folder, tmp_path / "run")
    with_more = config.with_name("more.yaml")
    with_more.write_text(config.read_text().replace("test_subset: 50", "test_subset: 40"))
    protocol = tmp_path / "run" / "protocol.json"
    assert json.loads(protocol.read_text())["changes"] == []
    for _ in range(2):
        keep_protocol(tmp_path / "run", load_config(CompareConfig, with_more, []), precision="fp32", tested=4)
    (sentence,) = describe_changes(tmp_path / "run")
    assert sentence.startswith("Settings were changed after test results were read (")
    assert sentence.endswith(", 4 cells): test_subset.")
