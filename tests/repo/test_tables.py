"""The tables of the pages are those of their files, and intervals follow from the published predictions."""

import re
import sys
from statistics import mean

import pytest
from helpers.commands import ROOT
from helpers.comparison import read_scores

from mae_vit.finetuning.comparison.report.significance import gap_between

sys.path.insert(0, str(ROOT / "docs" / "tools"))
import tables


def test_all_tables_are_those_of_their_files():
    assert [line for page in tables.pages() for line in tables.fill(page.name, page.read_text())[1]] == []
    marks = {match[2] for page in tables.pages() for match in tables.MARKED.finditer(page.read_text())}
    assert marks == set(tables.TABLES)


@pytest.mark.parametrize("name", tables.TABLES)
def test_another_digit_and_a_lost_line_are_named(name):
    made = tables.TABLES[name]()
    assert len(made.splitlines()) > 3
    digit = re.search(r"\d(?=\D*$)", made)
    other = f"{made[: digit.start()]}{(int(digit[0]) + 1) % 10}{made[digit.end() :]}"
    for wrong in (other, made.rpartition("\n")[0]):
        filled, complaints = tables.fill("docs/a.md", f"<!-- table {name} -->\n{wrong}\n<!-- end -->\n")
        assert filled == f"<!-- table {name} -->\n{made}\n<!-- end -->\n"
        assert [line.partition(" differs ")[0] for line in complaints] == [f"docs/a.md: table {name}"]


def test_a_page_that_differs_is_named_and_mended(monkeypatch, tmp_path, capsys):
    page = tmp_path / "docs" / "results" / "study_length" / "README.md"
    right = (ROOT / page.relative_to(tmp_path)).read_text()
    page.parent.mkdir(parents=True)
    page.write_text(right.replace("| 52.8 ± 3.3 |", "| 52.9 ± 3.3 |"))
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    tables.main()
    assert capsys.readouterr().out.startswith("docs/results/study_length/README.md: table length ")
    assert page.read_text() == right
    tables.main()
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("comparison", "reference", "gaps"),
    [
        ("compare_segmentation", "ViT-Tiny from scratch", 7),
        ("compare_cifar10_5k", "ViT-Tiny from scratch", 13),
        ("compare_cifar10_longer", "SmallResNet", 4),
        ("compare_cifar10_finetune_longer", "ViT-Tiny from MAE with contrast", 1),
        ("compare_cifar10_scratch_longer", "ViT-Tiny from scratch", 1),
        ("compare_cifar10_transfer", "ViT-Tiny from scratch", 6),
        ("study_length", "from scratch", 8),
        ("study_length_tiny_imagenet", "from scratch", 5),
        ("study_length_tiny_imagenet_cnn", "SmallResNet", 1),
    ],
)
def test_a_report_follows_from_the_published_predictions(comparison, reference, gaps):
    scores, lines = read_scores(ROOT / "docs" / "results" / comparison), tables.report(comparison)
    checked = 0
    for (entry, labels, mode), runs in scores.items():
        line, scratch = lines[entry, mode], scores[reference, labels, mode]
        if "test %" in line:
            assert line["test %"].split(" ")[0] == tables.percent(mean(one.correct.mean() for one in runs))
        if runs is not scratch:
            assert line["gap, points"] == gap_between(runs, scratch).in_brackets()
            checked += 1
    assert checked == gaps


@pytest.mark.parametrize(
    "comparison",
    [
        "compare_cifar10_5k",
        "compare_cifar10_longer",
        "compare_cifar10_transfer",
        "study_length",
        "study_length_tiny_imagenet",
    ],
)
def test_each_pair_of_a_report_follows_from_the_published_predictions(comparison):
    text = (ROOT / "docs" / "results" / comparison / "report.md").read_text()
    table = re.search(r"^\| above \|.*\n(?:\|.*\n)+", text, re.M)[0].splitlines()
    head, _, *lines = (line[2:-2].split(" | ") for line in table)
    scores = {
        entry: runs
        for (entry, _, mode), runs in read_scores(ROOT / "docs" / "results" / comparison).items()
        if mode == "finetune"
    }
    assert head[1:] == [line[0] for line in lines] == list(scores)
    for entry, *cells in lines:
        for other, cell in zip(head[1:], cells, strict=True):
            same = entry == other
            assert cell == ("" if same else gap_between(scores[entry], scores[other]).in_brackets())
