"""What a report says of the data behind it, which cells there are, and a bar over runs."""

import json
import shutil
from dataclasses import replace

import pytest
from helpers.comparison import config_of, plan_of, rows_of, spec

from mae_vit.finetuning.comparison.progress_bar import Bar
from mae_vit.finetuning.comparison.report.page import Report, reading
from mae_vit.finetuning.comparison.report.summary import lines_of, notes_of


def test_a_report_says_what_pretraining_was_spared(digits, tmp_path):
    data = shutil.copytree(digits, tmp_path / "data", ignore=shutil.ignore_patterns(".index"))

    def forms() -> tuple[str, str]:
        plan = plan_of(tmp_path, data={"path": str(data)}, pretrain={"MAE": {"config": "y.yaml"}})
        report = Report(plan, [], [])
        return report.to_markdown(), report.to_html()

    assert "Left out of" not in "".join(forms())
    described = json.loads((data / "dataset.json").read_text())
    excluded = {"source": "cifar10:test", "hash": "pHash of 64 bits", "distance": 4, "samples": 1234}
    described["splits"]["train"]["processing"] = {"excluded": [excluded]}
    (data / "dataset.json").write_text(json.dumps(described))
    for text in forms():
        assert "images of MAE: 1,234 that cifar10:test has too (pHash of 64 bits, at most 4 apart)" in text
    shutil.rmtree(data)
    assert "# x" in forms()[0]


@pytest.mark.parametrize(
    ("labels", "settings", "expected"),
    [
        (100, {}, {"finetune.draws": 1, "finetune.shots": [100]}),
        ("all", {}, {"finetune.draws": 1}),
        (100, {"finetune.shots": [5]}, {"finetune.draws": 1, "finetune.shots": [5]}),
    ],
)
def test_few_shot_cells_take_all_their_labels_in_one_draw(tmp_path, labels, settings, expected):
    entries = [{"name": "scratch", "set": settings}]
    (cell,) = plan_of(tmp_path, entries, modes=["few_shot"], labels_per_class=[labels], seeds=[0]).cells
    found = {key: value for key, value in cell.run.overrides.items() if key in expected or "shots" in key}
    assert found == expected


@pytest.mark.parametrize(
    ("mode", "labels", "seeds"),
    [
        ("finetune", 100, 3),
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


ENDED = {"status": "done", "total_steps": 10, "flops_per_step": 1e9}
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
        (
            ({"status": "done", "total_steps": 100, "flops_per_step": 30}, {"scoring_flops": 1000}),
            ({"status": "done", "total_steps": 100, "flops_per_step": 30}, {**ENDED, "total_steps": 1e-6}),
            (0.75, 1.0),
        ),
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


def test_the_eta_is_that_of_the_longest_run_once_few_are_left(tmp_path, monkeypatch, capsys):
    """Two slots: a short run has ended, a long one is at a tenth after 100 seconds."""
    now = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    monkeypatch.setattr("tqdm.std.time", lambda: now)
    short, long = (spec(name, tmp_path) for name in ("short", "long"))

    def reach(run, status, step, total):
        report_summary(run, status=status, total_steps=total, flops_per_step=10)
        (run.folder / "metrics.jsonl").write_text(f'{{"step": {step}, "loss": 1.0}}\n{{"step": 7')

    reach(short, "running", 0, 100)
    reach(long, "running", 0, 1000)
    bar = Bar([short, long])
    bar.show([short, long])
    now = 100.0
    reach(short, "done", 100, 100)
    reach(long, "running", 100, 1000)
    bar.show([long])
    bar.close()
    # By the mean rate of both it would be 450 s.
    assert "01:40<15:00" in capsys.readouterr().err.splitlines()[-1]


def test_notes_stand_below_the_table_once():
    rows = [*rows_of("other", [0.7], labels=100), *rows_of("other", [0.8], labels=200)]
    entry = rows[0].cell.entry.model_copy(update={"note": "nine times the labels"})
    rows = [replace(row, cell=replace(row.cell, entry=entry)) for row in rows]
    assert notes_of(lines_of(config_of(rows), rows)) == ["other: nine times the labels."]


@pytest.mark.parametrize(
    ("held_out", "text"), [(20, "have chosen the epoch"), (0, "no labeled image held out")]
)
def test_the_reading_says_whether_held_out_images_chose_the_epoch(held_out, text):
    rows = [*rows_of("scratch", [0.5, 0.6]), *rows_of("other", [0.7, 0.8])]
    rows = [replace(row, values=row.values | {"val_size": held_out}) for row in rows]
    config = config_of(rows)
    assert text in reading(config, lines_of(config, rows))[0]
