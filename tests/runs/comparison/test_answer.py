"""The first screen of a comparison's report: one sentence, no surer than the intervals, and one chart."""

import re
from dataclasses import replace

import pytest
from helpers.comparison import config_of, rows_of

from mae_vit.finetuning.comparison.plan import ComparisonPlan
from mae_vit.finetuning.comparison.report.answer import answer, first_chart
from mae_vit.finetuning.comparison.report.charts import Palette
from mae_vit.finetuning.comparison.report.page import Report
from mae_vit.finetuning.comparison.report.summary import lines_of


def answer_of(*groups):
    rows = [row for group in groups for row in group]
    config = config_of(rows)
    return answer(config, lines_of(config, rows))


def by_mode(mode, rows, **values):
    return [
        replace(
            row, cell=replace(row.cell, mode=mode), values=row.values | values, per_class={"a": 1, "b": 1}
        )
        for row in rows
    ]


SCRATCH = rows_of("scratch", [0.29, 0.30, 0.28])
MAE = rows_of("MAE", [0.973, 0.972, 0.974], start="MAE")
SEEN = rows_of("supervised", [0.99, 0.99, 0.99], start="s", seen="others")
OTHER_SEED = [replace(row, cell=replace(row.cell, seed=9)) for row in SCRATCH[:1]]
KNN = [
    by_mode("knn", rows)
    for rows in (rows_of("theirs", [0.5, 0.5], start="T"), rows_of("ours", [0.7, 0.7], start="O"))
]
FEW = [
    by_mode("few_shot", rows, shots=5)
    for rows in (rows_of("theirs", [0.2, 0.2], start="T"), rows_of("ours", [0.9, 0.9], start="O"))
]


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        (
            [SCRATCH, rows_of("A", [0.9] * 3), MAE, rows_of("CNN", [0.963, 0.962, 0.964])],
            "With 200 labels, MAE reaches 97.3 %, 68.3 points above scratch (29.0 %) and 1.0 points above CNN "
            "(96.3 %, the best without pretraining) (3 seeds).",
        ),
        # Modes are not mixed; few-shot takes as many labels as it draws.
        (
            [*KNN, *FEW],
            "With 200 labels, ours reaches 70.0 % by knn, 20.0 points above theirs (50.0 %) (2 seeds).",
        ),
        (
            FEW,
            "With 10 labels, ours reaches 90.0 % by few_shot, 70.0 points above theirs (20.0 %) (2 seeds).",
        ),
        # A small difference that is not clear is none, a large one may be chance.
        (
            [SCRATCH, MAE, rows_of("CNN", [0.974, 0.970, 0.976])],
            "... and level with CNN (97.3 %, the best ...",
        ),
        (
            [SCRATCH, MAE, rows_of("CNN", [0.99, 0.85, 0.93])],
            "... pretraining), which chance may explain (3 ...",
        ),
        (
            [rows_of("scratch", [0.9, 0.99, 0.8]), MAE],
            "... scratch (89.7 %), which chance may explain (3 seeds).",
        ),
        ([SCRATCH[:1], MAE[:1]], "... above scratch (29.0 %) (one seed: intervals cover test images alone)."),
        # Labels that weights have seen are named, and are the subject where there is nothing else.
        ([SCRATCH, MAE, SEEN], "With 200 labels, MAE reaches 97.3 %..."),
        (
            [SCRATCH, MAE, SEEN],
            "...; supervised is better still, at 99.0 %, from a start that has seen labels (3 ...",
        ),
        ([SCRATCH, SEEN], "With 200 labels, supervised reaches 99.0 %, 70.0 points above..."),
        (
            [rows_of("scratch", [0.9] * 3), rows_of("MAE", [0.8] * 3, start="M")],
            "...10.0 points below scratch (90...",
        ),
        (
            [SCRATCH, rows_of("A", [0.5] * 3), rows_of("B", [0.6] * 3)],
            "...B reaches 60.0 %, 31.0 points above...",
        ),
        ([OTHER_SEED, MAE], "..., beside scratch (29.0 %), of other seeds or test images (3 seeds)."),
    ],
)
def test_the_question_is_answered_as_far_as_the_intervals_allow(groups, expected):
    pattern = ".*".join(map(re.escape, expected.split("...")))
    assert re.fullmatch(pattern, answer_of(*groups))


def test_without_two_rows_to_compare_it_says_so():
    config = config_of(SCRATCH + MAE)
    for rows in (SCRATCH, MAE, []):
        assert (
            answer(config, lines_of(config, rows))
            == "Not finished yet: scratch and a row to compare it with."
        )


@pytest.mark.parametrize("sizes", [[200], [200, 1000]])
def test_the_first_screen_is_the_sentence_and_a_chart(tmp_path, sizes):
    rows = [
        row
        for labels in sizes
        for name, start, share in (("scr <b>$a$", None, 0.3), ("MAE", "MAE", 0.9))
        for row in rows_of(name, [share] * 2, start=start, labels=labels)
    ]
    config = config_of(rows)
    report = Report(ComparisonPlan(config, tmp_path, tmp_path / "out"), rows, [])
    page, text = report.to_html(), report.to_markdown()
    begin = page[: page.index("<table>")]
    assert begin.count("<svg") == 1
    sentence = f"With {max(sizes):,} labels, MAE reaches 90.0 %, 60.0 points above scr"
    assert begin.index(sentence) < begin.index("<svg")
    assert text.splitlines()[2].startswith(sentence)
    assert "<b>" not in page
    assert ("Accuracy on test images" if len(sizes) == 1 else "the range between them") in begin
    assert "scr &lt;b&gt;$a$" in begin[begin.index("<svg") :]


def test_bars_show_each_entry():
    rows = SCRATCH + MAE
    config = config_of(rows)
    drawn, _ = first_chart(config, rows, lines_of(config, rows), Palette(["scratch", "MAE"]))
    assert "scratch: 29.0 %" in drawn
    assert "MAE: 97.3 %" in drawn
    assert first_chart(config, [], [], Palette([])) is None
