"""The report of a comparison: one sentence, no surer than the intervals, one chart, and what stands below."""

import re
import shutil
from dataclasses import replace

import numpy as np
import pytest
from helpers.comparison import config_of, plan_of, rows_of
from helpers.damage import copy_of, description

from mae_vit.comparison.plan import ComparisonPlan
from mae_vit.comparison.report.page import Report, first_chart, reading
from mae_vit.comparison.report.summary import answer, collect_notes, table_lines
from mae_vit.weights.names import FOREIGN_ORIGIN


def answer_to(*groups):
    rows = [row for group in groups for row in group]
    config = config_of(rows)
    return answer(config, table_lines(config, rows))


def by(mode, rows, **values):
    return [
        replace(row, cell=replace(row.cell, mode=mode), values=row.values | values, num_classes=2)
        for row in rows
    ]


SCRATCH = rows_of("scratch", [0.29, 0.30, 0.28])
MAE = rows_of("MAE", [0.973, 0.972, 0.974], start="MAE")
SEEN = rows_of("supervised", [0.99, 0.99, 0.99], start="s", seen="others")
OTHER_SEED = [replace(row, cell=replace(row.cell, seed=9)) for row in SCRATCH[:1]]
KNN, FEW = (
    [by(mode, rows_of(name, [share] * 2, start=name), **values) for name, share in shares.items()]
    for mode, values, shares in (
        ("knn", {}, {"theirs": 0.5, "ours": 0.7}),
        ("few_shot", {"shots": 5}, {"theirs": 0.2, "ours": 0.9}),
    )
)
FROZEN = "timm:vit_small_patch14_dinov2"
# Nobody knows what it cost.
DINO = [
    replace(row, values=row.values | {"pretrain_flops": None})
    for row in rows_of("DINOv2", [0.99] * 3, start=FROZEN)
]
MARK = f"({FOREIGN_ORIGIN})"


def test_the_question_is_answered_as_far_as_the_intervals_allow(said):
    groups = [
        [SCRATCH, rows_of("A", [0.9] * 3), MAE, rows_of("CNN", [0.963, 0.962, 0.964])],
        # Modes are not mixed; few-shot takes as many labels as it draws.
        [*KNN, *FEW],
        FEW,
        # A small difference that is not clear is none, a large one may be chance.
        [SCRATCH, MAE, rows_of("CNN", [0.974, 0.970, 0.976])],
        [SCRATCH, MAE, rows_of("CNN", [0.99, 0.85, 0.93])],
        [rows_of("scratch", [0.9, 0.99, 0.8]), MAE],
        [SCRATCH[:1], MAE[:1]],
        # Labels that weights have seen are named, and are the subject where there is nothing else.
        [SCRATCH, MAE, SEEN],
        [SCRATCH, SEEN],
        [rows_of("scratch", [0.9] * 3), rows_of("MAE", [0.8] * 3, start="M")],
        [SCRATCH, rows_of("A", [0.5] * 3), rows_of("B", [0.6] * 3)],
        [OTHER_SEED, MAE],
        # Third-party encoders come last.
        [SCRATCH, MAE, DINO],
        [SCRATCH, DINO],
        [rows_of("DINOv2", [0.5] * 3, start=FROZEN), MAE],
        # The best without pretraining may be the reference.
        [SCRATCH, MAE, rows_of("CNN", [0.2] * 3)],
        # A comparison of one row.
        [MAE],
        # A row with fewer seeds.
        [SCRATCH, MAE, rows_of("CNN", [0.963])],
        # A row between pretraining and the best without it is not "better still".
        [
            SCRATCH,
            rows_of("MAE", [0.5] * 3, start="M"),
            rows_of("CNN", [0.7] * 3),
            rows_of("longer", [0.96] * 3),
        ],
    ]
    for group in groups:
        said(answer_to(*group))
    config = config_of(SCRATCH + MAE).model_copy(update={"labels_per_class": [200]})
    for rows in (SCRATCH, MAE, []):
        assert answer(config, table_lines(config, rows)).startswith("Not finished")
    # Finished, but no row is like the reference.
    first, second = config.entries
    apart = config.model_copy(update={"entries": [first, second.model_copy(update={"modes": ["knn"]})]})
    said(answer(apart, table_lines(apart, [*SCRATCH, *by("knn", MAE)])))


def report_on(rows: list, folder) -> Report:
    return Report(ComparisonPlan(config_of(rows), folder, folder / "out"), rows, [])


@pytest.mark.parametrize("sizes", [[200], [200, 1000]])
def test_the_first_screen_is_the_sentence_and_a_chart(tmp_path, sizes):
    rows = [
        row
        for labels in sizes
        for name, start, share in (("scr <b>$a$", None, 0.3), ("MAE", "MAE", 0.9))
        for row in rows_of(name, [share] * 2, start=start, labels=labels)
    ]
    report = report_on(rows, tmp_path)
    page, text = report.to_html(), report.to_markdown()
    begin = page[: page.index("<table>")]
    assert begin.count("<svg") == 1
    sentence = f"With {max(sizes):,} labels, MAE reaches 90.0 %"
    assert begin.index(sentence) < begin.index("<svg")
    assert text.splitlines()[2].startswith(sentence)
    assert "<b>" not in page
    assert ("Accuracy on" if len(sizes) == 1 else "range between") in begin
    assert "scr &lt;b&gt;$a$" in begin[begin.index("<svg") :]


@pytest.mark.parametrize("sizes", [[200], [200, 1000]])
def test_the_chart_fits_the_values_and_names_chance(tmp_path, sizes):
    """Ten classes of test images, one of them with a fifth of all."""
    truth = np.minimum(np.arange(1000) // 100, 8)
    rows = [
        replace(row, truth=truth, predicted=np.where(row.predicted == 1, truth, truth + 1))
        for labels in sizes
        for name, start, share in (("scratch", None, 0.21), ("MAE", "MAE", 0.3))
        for row in rows_of(name, [share] * 2, start=start, labels=labels)
    ]
    page = report_on(rows, tmp_path).to_html()
    begin = page[: page.index("<table>")]
    assert "chance: 20.0 %" in begin
    assert "always naming their most frequent class" in begin
    ticks = [int(tick) for tick in re.findall(r">(\d+)</text>", begin)]
    assert 25 <= max(ticks) <= 30


def test_a_third_party_encoder_is_marked_wherever_it_is_named(tmp_path):
    rows = [*SCRATCH, *MAE, *DINO]
    config = config_of(rows)
    entries = [entry.model_copy() for entry in config.entries]
    entries[2] = entries[2].model_copy(update={"start": FROZEN, "modes": ["knn"]})
    config = config.model_copy(update={"entries": entries})
    report = Report(ComparisonPlan(config, tmp_path, tmp_path / "out"), rows, [])
    page, text = report.to_html(), report.to_markdown()
    lines = table_lines(config, rows)
    chart, _ = first_chart(config, lines)
    assert all(MARK in shown for shown in (page, text, chart))
    assert "scratch: 29.0 %" in chart
    marked = page.replace(f"DINOv2 {MARK}", "")
    # What is left is the note below the table, which says more.
    assert re.findall(r"DINOv2.{12}", marked) == ["DINOv2: weights of"] * marked.count("DINOv2")
    (note,) = collect_notes(lines)
    assert note.startswith("DINOv2: weights of others")
    assert first_chart(config, []) is None


def test_a_report_says_what_pretraining_was_spared(digits, tmp_path):
    data = copy_of(digits, tmp_path / "data")

    def forms() -> list[str]:
        plan = plan_of(tmp_path, data={"path": str(data)}, pretrain={"MAE": {"config": "y.yaml"}})
        report = Report(plan, [], [])
        return [report.to_markdown(), report.to_html()]

    assert "Left out" not in "".join(forms())
    with description(data) as described:
        excluded = {"source": "cifar10:test", "hash": "pHash of 64 bits", "distance": 4, "samples": 1234}
        described["splits"]["train"]["processing"] = {"excluded": [excluded]}
    for text in forms():
        assert all(part in text for part in ("MAE: 1,234", "cifar10:test", "pHash of 64", "4 apart"))
    shutil.rmtree(data)
    assert "# x" in forms()[0]


def test_notes_stand_below_the_table_once():
    rows = [*rows_of("other", [0.7], labels=100), *rows_of("other", [0.8], labels=200)]
    entry = rows[0].cell.entry.model_copy(update={"note": "its note"})
    rows = [replace(row, cell=replace(row.cell, entry=entry)) for row in rows]
    assert collect_notes(table_lines(config_of(rows), rows)) == ["other: its note."]


def test_image_sizes_are_noted_where_they_differ():
    ours, theirs = rows_of("ours", [0.7]), rows_of("theirs", [0.8])

    def notes(*sizes: str | None) -> list[str]:
        rows = [
            replace(row, values=row.values | {"img_size": size})
            for row, size in zip(ours + theirs, sizes, strict=True)
        ]
        return collect_notes(table_lines(config_of(rows), rows))

    assert notes("64x64", "64x64") == notes(None, "64x64") == []
    assert notes("64x64", "224x224") == ["ours: images of 64x64 px.", "theirs: images of 224x224 px."]


def test_the_reading_says_whether_held_out_images_chose_the_epoch():
    texts = set()
    for held_out in (20, 0):
        rows = [*rows_of("scratch", [0.5, 0.6]), *rows_of("other", [0.7, 0.8])]
        rows = [replace(row, values=row.values | {"val_size": held_out}) for row in rows]
        config = config_of(rows)
        text = reading(config, table_lines(config, rows))
        assert ("without validation images" in text) == (held_out == 0)
        texts.add(text)
    assert len(texts) == 2
