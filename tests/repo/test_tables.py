"""Tables and figures of README, docs and configs are those of the files under docs/results."""

import copy
import re
import sys

import pytest
from helpers.commands import ROOT

from mae_vit.finetuning.comparison.report.predictions import read_scores
from mae_vit.finetuning.comparison.report.significance import gap_between

sys.path.insert(0, str(ROOT / "docs" / "tools"))
import page_tables.files as files
import tables

# The tables of this page take seconds, which test_scaling_plan.py needs anyway.
SLOW_PAGE = "docs/scaling.md"


@pytest.mark.parametrize("page", [page for page in tables.pages() if page != SLOW_PAGE])
def test_the_page_is_what_its_files_say(page):
    text = (ROOT / page).read_text()
    filled, complaints = tables.fill(page, text)
    complaints += tables.missing_links(page, text)
    assert not complaints, "\n".join(["run python docs/tools/tables.py --write", *complaints])
    assert filled == text


def test_each_table_stands_in_one_page():
    pages = "".join((ROOT / page).read_text() for page in tables.pages())
    assert sorted(re.findall("<!-- table (.*?) -->", pages)) == sorted(tables.TABLES)


@pytest.mark.parametrize("page", ["README.md", "docs/performance.md", "docs/results.md"])
def test_any_other_figure_is_seen_and_mended(page):
    """Each digit of a marked table, and the figures of each sentence, one after the other."""
    text = (ROOT / page).read_text()
    places = [
        match.start(3) + digit.start()
        for match in tables.MARKED.finditer(text)
        if tables.TABLES[match[2]].files
        for digit in list(re.finditer(r"\d", match[3]))[::23]
    ]
    for words, _ in tables.SENTENCES.get(page, ()):
        match = tables.pattern(words).search(text)
        places += [match.start(group) for group in range(2, match.re.groups + 1, 2)]
    for place in places:
        # A figure's first sign may be a minus.
        other = str((int(text[place]) + 1) % 10) if text[place].isdigit() else "4"
        wrong = text[:place] + other + text[place + 1 :]
        filled, complaints = tables.fill(page, wrong)
        assert len(complaints) == 1, (text[place - 40 : place + 40], complaints)
        assert complaints[0].startswith(f"{page}: ")
        assert filled.split() == text.split(), text[place - 40 : place + 40]


@pytest.mark.parametrize(
    ("file", "keys", "page", "table"),
    [
        ("engine.json", ("results", "torch", "ms_over_bare", "mean"), "docs/performance.md", "engine"),
        ("loader.json", ("results", "full", "images_per_s", "ours"), "docs/performance.md", "loader"),
        (
            "pretraining.json",
            ("joint_cifar_tiny", "heldout", "mae_psnr_db"),
            "docs/results.md",
            "pretraining",
        ),
    ],
)
def test_another_value_in_a_file_is_seen(monkeypatch, file, keys, page, table):
    part = copy.deepcopy(files.load(file))
    changed = part
    for key in keys[:-1]:
        part = part[key]
    part[keys[-1]] += 3
    load = files.load
    for module in (files, tables.pretraining):
        monkeypatch.setattr(module, "load", lambda name: changed if name == file else load(name))
    _, complaints = tables.fill(page, (ROOT / page).read_text())
    assert any(line.startswith(f"{page}: table {table}: has ") for line in complaints)


def test_a_sentence_that_is_gone_and_an_unknown_table_are_named():
    text = (ROOT / "README.md").read_text()
    _, complaints = tables.fill("README.md", re.sub(r"In\s+30\s+epochs\s+SimpleCNN", "SimpleCNN", text))
    assert complaints == [
        "README.md: 0 times in the page, not once: In 30 epochs SimpleCNN reaches {} %, SmallResNet {} %."
    ]
    _, complaints = tables.fill("docs/data.md", "<!-- table stpe -->\n| a |\n<!-- end -->\n")
    assert complaints == ["docs/data.md: no table is called stpe"]


def test_a_table_without_a_link_to_its_file_is_named():
    page = "# A\n\n[b](results/engine.json)\n\n## B\n\n<!-- table engine -->\n| a |\n<!-- end -->\n"
    (line,) = tables.missing_links("docs/a.md", page)
    assert "docs/results/engine.json" in line


def report_lines(comparison):
    """The cells of the report's first table by entry and mode, as a dictionary by column."""
    text = files.text(f"{comparison}/report.md").partition("\n## Settings\n")[0]
    lines = [[cell.strip() for cell in line[1:-1].split("|")] for line in text.splitlines()]
    (head,) = (line for line in lines if line[0] == "entry")
    cells = [dict(zip(head, line, strict=True)) for line in lines if len(line) == len(head) > 1]
    return {
        (re.sub(r" \(.*", "", each["entry"]), each.get("mode", "finetune").split(",")[0]): each
        for each in cells
    }


def test_reports_have_the_accuracies_of_their_runs():
    """Intervals are of report.md, means of results.csv: both are of the same runs."""
    for comparison in (tables.comparisons.FIVE_K, tables.comparisons.TRANSFER):
        lines = report_lines(comparison)
        for entry in tables.comparisons.rows(comparison):
            measured = tables.comparisons.percent(comparison, entry)
            assert lines[entry, "finetune"]["test %"] == tables.comparisons.spread(measured)


def test_check_names_the_page_and_write_mends_it(monkeypatch, tmp_path, capsys):
    right = (ROOT / "README.md").read_text()
    page = tmp_path / "README.md"
    page.write_text(right.replace("67.8 % after MAE (100", "67.9 % after MAE (100"))
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    monkeypatch.setattr(tables, "pages", lambda: ["README.md"])
    monkeypatch.setattr(sys, "argv", ["tables.py", "--check"])
    assert tables.main() == 1
    assert (
        "README.md: has ['49.2', '63.6', '67.9', '71.0'], its files ['49.2', '63.6', '67.8', '71.0']"
        in capsys.readouterr().out
    )
    monkeypatch.setattr(sys, "argv", ["tables.py", "--write"])
    assert tables.main() == 0
    assert page.read_text() == right


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
def test_intervals_of_a_report_follow_from_the_published_predictions(comparison, reference, gaps):
    scores, lines = read_scores(ROOT / "docs" / "results" / comparison), report_lines(comparison)
    checked = 0
    for (entry, labels, mode), runs in scores.items():
        scratch = scores[reference, labels, mode]
        if runs is scratch:
            continue
        assert lines[entry, mode]["gap, points"] == gap_between(runs, scratch).in_brackets()
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
    scores = read_scores(ROOT / "docs" / "results" / comparison)
    labels = next(iter(scores))[1]
    names = [entry for entry, _, mode in scores if mode == "finetune"]
    pairs = [(entry, other) for entry in names for other in names if entry != other]
    for entry, other in pairs:
        gap = gap_between(*(scores[name, labels, "finetune"] for name in (entry, other)))
        printed = re.findall(r"-?[0-9.]+", gap.in_brackets())
        assert list(tables.comparisons.above(comparison, entry, other)) == printed, (entry, other)
    assert len(pairs) >= 12


def test_the_longer_cnn_beside_the_contrast():
    """Two comparisons with the same labels and test images: the intervals in the pages are of both predictions."""
    longer = read_scores(ROOT / "docs/results/compare_cifar10_longer")[
        "SmallResNet, 314 epochs", "500", "finetune"
    ]
    contrast = read_scores(ROOT / "docs/results/compare_cifar10_5k")[
        "ViT-Tiny from MAE with contrast", "500", "finetune"
    ]
    assert len(longer) == len(contrast) == 3
    points, low, high = re.findall(r"-?[0-9.]+", gap_between(longer, contrast).in_brackets())
    for name, contrast_is in {
        "README.md": "MAE with a contrast",
        "docs/results.md": "the ViT with the contrast",
    }.items():
        page = " ".join((ROOT / name).read_text().split())
        assert f"That is {points} points above {contrast_is} ({low} to {high}), whose compute is" in page


def test_the_longer_cnn_beside_the_longer_fine_tuning():
    longer, tuned = (
        read_scores(ROOT / "docs/results" / comparison)[entry, "500", "finetune"]
        for comparison, entry in (
            ("compare_cifar10_longer", "SmallResNet, 314 epochs"),
            ("compare_cifar10_finetune_longer", "ViT-Tiny from MAE with contrast, 100 epochs"),
        )
    )
    assert len(longer) == len(tuned) == 3
    points, low, high = re.findall(r"-?[0-9.]+", gap_between(longer, tuned).in_brackets())
    page = " ".join((ROOT / "docs/results.md").read_text().split())
    assert f"SmallResNet after 314 epochs is {points} points above them ({low} to {high})." in page


def test_the_longer_cnn_beside_mae_on_photographs():
    """Seed 0 of two comparisons, with the same labels; the interval in the page is of both predictions."""
    results = ROOT / "docs/results"
    again = read_scores(results / "study_length_tiny_imagenet_cnn")
    before = read_scores(results / "study_length_tiny_imagenet")
    cnn, mae = (
        again["SmallResNet, 257 epochs", "50", "finetune"],
        before["MAE, 6,000 steps", "50", "finetune"][:1],
    )
    points, low, high = re.findall(r"-?[0-9.]+", gap_between(cnn, mae).in_brackets())
    page = " ".join((ROOT / "docs/choosing.md").read_text().split())
    assert f"may be chance: {points} points ({low} to {high}, by the choice of test images alone)" in page
    # After 30 epochs it is right on the same images as before.
    (shorter,), first = again["SmallResNet", "50", "finetune"], before["SmallResNet", "50", "finetune"][0]
    assert (shorter.correct == first.correct).all()


@pytest.mark.parametrize(
    ("comparison", "entry"),
    [
        ("compare_cifar10_longer", "SmallResNet"),
        ("compare_cifar10_longer", "SimpleCNN"),
        ("compare_cifar10_scratch_longer", "ViT-Tiny from scratch"),
        ("compare_cifar10_finetune_longer", "ViT-Tiny from MAE with contrast"),
    ],
)
def test_rows_that_ran_again_are_right_on_the_same_images(comparison, entry):
    """docs/results.md says so of these comparisons."""
    again, before = (
        read_scores(ROOT / "docs/results" / name)[entry, "500", "finetune"]
        for name in (comparison, "compare_cifar10_5k")
    )
    assert len(again) == len(before) == 3
    for ours, theirs in zip(again, before, strict=True):
        assert (ours.correct == theirs.correct).all()
