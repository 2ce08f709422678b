"""One progress bar over many runs."""

import json

import pytest
from helpers.comparison import spec

from mae_vit.finetuning.comparison.runner import Bar

ENDED = {"status": "done", "total_steps": 10, "flops_per_step": 1e9}
LONG = {"status": "done", "total_steps": 100, "flops_per_step": 30}
SCORED = {"overrides": {"finetune.mode": "knn"}}


def report_summary(run, **summary) -> None:
    run.folder.mkdir(exist_ok=True)
    (run.folder / "summary.json").write_text(json.dumps(summary))


@pytest.mark.parametrize(
    ("first", "later", "shares"),
    [
        # Runs that are done in one go.
        ((ENDED, {}), (ENDED, ENDED), (0.5, 1.0)),
        # A long run is done, neighbours are still searched: they take a third of its FLOPs.
        ((LONG, {"scoring_flops": 1000}), (LONG, {**ENDED, "total_steps": 1e-6}), (0.75, 1.0)),
    ],
)
def test_a_bar_counts_flops(tmp_path, first, later, shares):
    runs = [spec("a", tmp_path), spec("b", tmp_path, **SCORED)]
    bar = Bar(runs)
    bar.show(runs)
    for summaries, share in zip((first, later), shares, strict=True):
        for run, summary in zip(runs, summaries, strict=True):
            if summary:
                report_summary(run, **summary)
        bar.show(runs)
        assert bar._bar.n == pytest.approx(share)
    bar.close()


def test_scoring_that_has_not_begun_counts_as_the_least_known(tmp_path):
    runs = [spec("a", tmp_path), *(spec(name, tmp_path, **SCORED) for name in "bc")]
    for run, flops in zip(runs, (3000, 500), strict=False):
        report_summary(run, status="done", scoring_flops=flops)
    bar = Bar(runs)
    bar.show([])
    assert bar._bar.n == pytest.approx(3500 / 4000)
    bar.close()


def test_what_was_done_before_is_no_part_of_the_time_left(tmp_path):
    runs = [spec(name, tmp_path) for name in "abcdef"]
    for run in (runs[0], runs[1], runs[4]):
        report_summary(run, **ENDED)
    bar = Bar(runs)
    bar.show(runs[2:4])
    for name in ("start_t", "last_print_t"):
        setattr(bar._bar, name, getattr(bar._bar, name) - 100)
    assert "01:40<?" in str(bar._bar)
    report_summary(runs[2], **ENDED)
    bar.show(runs[3:4])
    assert "01:40<03:20" in str(bar._bar)  # a sixth of it all in 100 s, two left
