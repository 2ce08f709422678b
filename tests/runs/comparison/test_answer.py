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


SCRATCH = rows_of("scratch", [0.29, 0.30, 0.28])
MAE = rows_of("MAE", [0.973, 0.972, 0.974], start="MAE")


def test_the_question_is_answered():
    cnn = rows_of("SmallResNet", [0.963, 0.962, 0.964])
    sentence = answer_of(SCRATCH, rows_of("SimpleCNN", [0.9, 0.9, 0.9]), MAE, cnn)
    assert sentence == (
        "With 200 labels, MAE reaches 97.3 %, 68.3 points above scratch (29.0 %) and 1.0 points above SmallResNet "
        "(96.3 %, the best without pretraining) (3 seeds)."
    )


def test_modes_of_frozen_encoders_are_not_mixed():
    def by(mode, rows, **values):
        return [
            replace(
                row, cell=replace(row.cell, mode=mode), values=row.values | values, per_class={"a": 1, "b": 1}
            )
            for row in rows
        ]

    theirs, ours = rows_of("theirs", [0.5, 0.5], start="T"), rows_of("ours", [0.7, 0.7], start="O")
    other = rows_of("theirs", [0.2, 0.2], start="T"), rows_of("ours", [0.9, 0.9], start="O")
    knn = [by("knn", theirs), by("knn", ours)]
    few = [by("few_shot", rows, shots=5) for rows in other]
    sentence = answer_of(*knn, *few)
    assert (
        sentence
        == "With 200 labels, ours reaches 70.0 % by knn, 20.0 points above theirs (50.0 %) (2 seeds)."
    )
    assert answer_of(*few).startswith("With 10 labels, ours reaches 90.0 % by few_shot, 70.0 points above")


def test_a_small_difference_that_is_not_clear_is_level():
    sentence = answer_of(SCRATCH, MAE, rows_of("CNN", [0.974, 0.970, 0.976]))
    assert "and level with CNN (97.3 %, the best without pretraining) (3 seeds)." in sentence


def test_what_chance_may_explain_says_so():
    wide = rows_of("CNN", [0.99, 0.85, 0.93])
    sentence = answer_of(SCRATCH, MAE, wide)
    assert (
        "and 5.0 points above CNN (92.3 %, the best without pretraining), which chance may explain"
        in sentence
    )
    sentence = answer_of(rows_of("scratch", [0.9, 0.99, 0.8]), MAE)
    assert "points above scratch (89.7 %), which chance may explain (3 seeds)." in sentence


def test_few_seeds_are_named():
    sentence = answer_of(SCRATCH[:1], MAE[:1])
    assert sentence.endswith(
        "68.3 points above scratch (29.0 %) (one seed: intervals cover test images alone)."
    )
    assert answer_of(SCRATCH[:2], MAE[:2]).endswith(" (2 seeds).")


def test_labels_that_a_start_has_seen_are_named():
    seen = rows_of("supervised", [0.99, 0.99, 0.99], start="s", seen="others")
    sentence = answer_of(SCRATCH, MAE, seen)
    assert sentence.startswith("With 200 labels, MAE reaches 97.3 %")
    assert "; supervised is better still, at 99.0 %, from a start that has seen labels (3 seeds)." in sentence
    # It is the subject where there is nothing else.
    assert answer_of(SCRATCH, seen).startswith(
        "With 200 labels, supervised reaches 99.0 %, 70.0 points above"
    )


def test_a_worse_start_is_below():
    sentence = answer_of(rows_of("scratch", [0.9, 0.9, 0.9]), rows_of("MAE", [0.8, 0.8, 0.8], start="MAE"))
    assert "MAE reaches 80.0 %, 10.0 points below scratch (90.0 %)" in sentence


def test_without_networks_of_pretraining_the_best_is_named():
    sentence = answer_of(SCRATCH, rows_of("A", [0.5] * 3), rows_of("B", [0.6] * 3))
    assert sentence == "With 200 labels, B reaches 60.0 %, 31.0 points above scratch (29.0 %) (3 seeds)."


def test_without_two_rows_to_compare_it_says_so():
    config = config_of(SCRATCH + MAE)
    for rows in (SCRATCH, MAE, []):
        assert answer(config, lines_of(config, rows)) == "Not finished yet: scratch and a row to compare it with."


def test_entries_of_other_seeds_are_set_beside_it():
    others = [replace(one, cell=replace(one.cell, seed=9)) for one in SCRATCH[:1]]
    assert ", beside scratch (29.0 %), of other seeds or test images (3 seeds)." in answer_of(others, MAE)


@pytest.mark.parametrize("sizes", [[200], [200, 1000]])
def test_the_first_screen_is_the_sentence_and_a_chart(tmp_path, sizes):
    rows = [
        one
        for labels in sizes
        for name, start, share in (("scr <b>$a$", None, 0.3), ("MAE", "MAE", 0.9))
        for one in rows_of(name, [share] * 2, start=start, labels=labels)
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
    caption = "Accuracy on test images" if len(sizes) == 1 else "the range between them"
    assert caption in begin
    assert re.search(r"scr &lt;b&gt;\$a\$", begin[begin.index("<svg") :])
    assert page.count("Accuracy against labels") == 0


def test_bars_show_each_entry():
    rows = SCRATCH + MAE
    config = config_of(rows)
    drawn, _ = first_chart(config, rows, lines_of(config, rows), Palette(["scratch", "MAE"]))
    assert "scratch: 29.0 %" in drawn
    assert "MAE: 97.3 %" in drawn
    assert first_chart(config, [], [], Palette([])) is None
