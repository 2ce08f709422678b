"""The tables of the pages are those of their files, and intervals follow from the published predictions."""

import csv
import re
import sys
from statistics import mean

import pytest
from helpers.commands import ROOT
from helpers.comparison import read_scores

from mae_vit.comparison.report.significance import gap_between

sys.path.insert(0, str(ROOT / "docs" / "tools"))
import tables

WITH_CONTRAST = "ViT-Tiny from MAE with contrast"
MIXING, PHOTOS = "compare_cifar10_mixing", "compare_photos_contrast"
CNNS, LONG_CNN = "compare_cifar10_longer", "SmallResNet, 314 epochs"
LONG_CONTRAST, LONGER = "compare_cifar10_contrast_longer", f"{WITH_CONTRAST}, 146 epochs"


def test_all_tables_are_those_of_their_files():
    assert [line for page in tables.pages() for line in tables.fill(page.name, page.read_text())[1]] == []
    marks = {match[2] for page in tables.pages() for match in tables.MARKED.finditer(page.read_text())}
    assert set(tables.TABLES) <= marks


def test_presets_that_were_not_run_are_not_among_the_measured():
    measured, others = tables.recipes()
    for name, table in (("mae_photos_224", others), ("contrastive_small_resnet_cifar", measured)):
        assert (f"`{name}`" in measured, f"`{name}`" in others) == (table is measured, table is others)


def test_times_of_a_core_are_the_sums_of_the_runs():
    summed = set()
    for header in map(tables.read_header, tables.preset_paths()):
        time = re.match(r"([\d.]+) (minutes|hours) of a core", header.lines["Time"])
        path = tables.RESULTS / header.name / "results.csv"
        if time and path.is_file():
            with path.open() as file:
                rows = list(csv.DictReader(file))
            pretrained = {row["entry"]: float(row["pretrain_s"] or 0) for row in rows}
            total = sum(pretrained.values()) + sum(float(row["finetune_s"] or 0) for row in rows)
            digits = len(time[1].partition(".")[2])
            assert time[1] == f"{total / {'minutes': 60, 'hours': 3600}[time[2]]:.{digits}f}", header.name
            summed.add(header.name)
    assert len(summed) == 5


def test_a_page_that_differs_is_named_and_mended(monkeypatch, tmp_path, capsys):
    page = tmp_path / "docs" / "results" / "study_length" / "README.md"
    right = (ROOT / page.relative_to(tmp_path)).read_text()
    page.parent.mkdir(parents=True)
    page.write_text(right.replace("| 52.8 ± 3.3 |", "| 52.9 ± 3.3 |"))
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    tables.main()
    assert capsys.readouterr().out.startswith("docs/results/study_length/README.md: table study_length ")
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
        (LONG_CONTRAST, LONGER, 0),
        (MIXING, f"{LONG_CNN}, mixed", 2),
        ("compare_cifar10_pretrained_cnn", "SmallResNet", 2),
        ("compare_cifar10_scratch_longer", "ViT-Tiny from scratch", 1),
        ("compare_cifar10_ti4", "ViT-Ti/4 from scratch", 1),
        ("compare_cifar10_transfer", "ViT-Tiny from scratch", 6),
        ("compare_photos", "ViT from scratch", 3),
        (PHOTOS, "ViT from contrast", 2),
        ("study_few_images", "ViT from scratch", 3),
        ("study_thousand_photos", "ViT from scratch", 5),
        ("ladder", "control, seed 0", 51),
        ("study_finetuning", "ViT, control", 12),
        ("study_mixing_photos", "contrast", 5),
        ("study_length", "from scratch", 8),
        ("study_recipes", "MAE, seed 0", 21),
        ("study_unseen", "ViT from scratch", 1),
        ("study_length_tiny_imagenet", "from scratch", 5),
        ("study_length_tiny_imagenet_cnn", "SmallResNet", 1),
    ],
)
def test_a_report_follows_from_the_published_predictions(comparison, reference, gaps):
    scores, lines = read_scores(ROOT / "docs" / "results" / comparison), tables.report(comparison)
    checked = 0
    for (entry, labels, mode), runs in scores.items():
        line, scratch = lines[entry, mode], scores.get((reference, labels, mode))
        if "test %" in line:
            assert line["test %"].split(" ")[0] == tables.decimal(
                100 * mean(one.correct.mean() for one in runs)
            )
        if scratch is None:  # frozen, and no random encoder beside it
            assert line["gap, points"] == ""
        elif runs is not scratch:
            assert line["gap, points"] == gap_between(runs, scratch).in_brackets()
            checked += 1
    assert checked == gaps


@pytest.mark.parametrize(
    ("comparison", "entry", "other", "row", "said"),
    [
        (CNNS, LONG_CNN, "compare_cifar10_5k", WITH_CONTRAST, "2.9 points (0.6 to 5.3)"),
        (LONG_CONTRAST, LONGER, "compare_cifar10_5k", WITH_CONTRAST, "4.1 points (2.8 to 5.4)"),
        (LONG_CONTRAST, LONGER, CNNS, LONG_CNN, "1.2 points (-0.8 to 3.2)"),
        (MIXING, f"{LONG_CNN}, mixed", CNNS, LONG_CNN, "1.8 points (-0.9 to 4.5)"),
        (MIXING, "ViT-Tiny from contrast, 146 epochs, mixed", LONG_CONTRAST, LONGER, "1.9 points (0.7 to 3.0)"),
        (PHOTOS, "ViT from contrast", "compare_photos", "ViT from MAE", "1.2 points (-2.0 to 4.4)"),
        (PHOTOS, "ViT from contrast, mixed", "compare_photos", "ViT from MAE", "3.4 points (0.3 to 6.6)"),
        (PHOTOS, "SmallResNet, 350 epochs, mixed", "compare_photos", "ViT from MAE", "5.1 points (2.3 to 7.9)"),
    ],
)  # fmt: skip
def test_differences_between_comparisons_follow_from_their_predictions(comparison, entry, other, row, said):
    scores, others = (read_scores(ROOT / "docs" / "results" / name) for name in (comparison, other))
    labels = "all" if comparison == PHOTOS else "500"
    gap = gap_between(scores[entry, labels, "finetune"], others[row, labels, "finetune"])
    low, high = gap.points - gap.half_width, gap.points + gap.half_width
    assert said == f"{gap.points:.1f} points ({low:.1f} to {high:.1f})"
    page = (ROOT / "docs" / "results" / comparison / "README.md").read_text()
    assert said in " ".join(page.split())
