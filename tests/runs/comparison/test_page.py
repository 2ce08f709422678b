"""What a report says of the data behind it, and a bar of runs that take no steps."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers.comparison import config_of, gap_of, row, rows_of
from helpers.images import encoded, picture, write_files

from mae_vit.data.shards.dataset_json import read_dataset
from mae_vit.finetuning.comparison.config import CompareConfig
from mae_vit.finetuning.comparison.jobs import Job
from mae_vit.finetuning.comparison.matrix.matrix import Matrix
from mae_vit.finetuning.comparison.progress_bar import Bar
from mae_vit.finetuning.comparison.report.answer import describe_crossings
from mae_vit.finetuning.comparison.report.encoder_views import data_of
from mae_vit.finetuning.comparison.report.page import _reading, write_page, write_text
from mae_vit.finetuning.comparison.report.summary import Line, lines_of, notes_of, terminal_table


def matrix_on(data, tmp_path) -> Matrix:
    entry = {"name": "scratch", "config": "x.yaml"}
    raw = {"run": {"name": "x"}, "data": {"path": str(data)}, "entries": [entry], "reference": "scratch"}
    raw["pretrain"] = {"MAE": {"config": "y.yaml"}}
    return Matrix(CompareConfig.model_validate(raw), tmp_path, tmp_path / "out")


def test_a_report_says_what_pretraining_was_spared(digits, tmp_path):
    data = shutil.copytree(digits, tmp_path / "data", ignore=shutil.ignore_patterns(".index"))
    matrix = matrix_on(data, tmp_path)
    assert "Left out of" not in write_text(matrix, [], []) + write_page(matrix, [], [])
    described = json.loads((data / "dataset.json").read_text())
    excluded = {"source": "cifar10:test", "hash": "pHash of 64 bits", "distance": 4, "samples": 1234}
    described["splits"]["train"]["processing"] = {"excluded": [excluded]}
    (data / "dataset.json").write_text(json.dumps(described))
    assert read_dataset(data).splits["train"].processing.excluded
    for text in (write_text(matrix, [], []), write_page(matrix, [], [])):
        assert (
            "Left out of the pretraining images of MAE: 1,234 that cifar10:test has too (pHash of 64 bits,"
            in text
        )
    shutil.rmtree(data)
    assert "# x" in write_text(matrix, [], [])


def few_shot_of(tmp_path, labels, **settings) -> list[str]:
    entry = {"name": "scratch", "config": "x.yaml", "set": settings}
    raw = {"run": {"name": "x"}, "data": {"path": "data"}, "entries": [entry], "reference": "scratch"}
    config = CompareConfig.model_validate(
        {**raw, "modes": ["few_shot"], "labels_per_class": [labels], "seeds": [0]}
    )
    (cell,) = Matrix(config, tmp_path, tmp_path / "out").cells(compute_of=False)
    return [
        argument
        for argument in cell.job.arguments
        if argument.startswith(("finetune.shots", "finetune.draws"))
    ]


def test_few_shot_cells_take_all_their_labels_in_one_draw(tmp_path):
    assert few_shot_of(tmp_path, 100) == ["finetune.draws=1", "finetune.shots=[100]"]
    assert few_shot_of(tmp_path, "all") == ["finetune.draws=1"]
    assert few_shot_of(tmp_path, 100, **{"finetune.shots": [5]}) == ["finetune.draws=1", "finetune.shots=[5]"]


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
    entries = [
        {"name": name, "config": "x.yaml", **({"start": "x.safetensors"} if name == "start" else {})}
        for name in ("scratch", "start")
    ]
    raw = {"run": {"name": "x"}, "data": {"path": "data"}, "entries": entries, "reference": "scratch"}
    config = CompareConfig.model_validate(
        {**raw, "modes": [mode], "labels_per_class": [labels], "seeds": [3, 4, 5]}
    )
    matrix = Matrix(config, tmp_path, tmp_path / "out")
    seeds_of = {name: [] for name in ("scratch", "start")}
    for cell in matrix.cells(compute_of=False):
        seeds_of[cell.entry.name].append(cell.seed)
    # Weights from scratch are drawn.
    assert seeds_of == {"scratch": [3, 4, 5], "start": [3, 4, 5][:seeds]}
    assert matrix.count_cells() == 3 + seeds


def lines_crossing(spread: float) -> list[Line]:
    """A reference, and an entry that is below it on 100 labels and above it on 1,000."""
    lines = []
    for labels, ahead in ((100, -0.1), (1000, 0.1)):
        scores = {}
        for name, plus in (("scratch", 0.0), ("other", ahead)):
            rows = []
            for seed in range(3):
                share = 0.5 + plus * (1 + spread * (seed - 1))
                one = row(name, seed, np.arange(2000) < 2000 * share)
                values = one.values | {"train_size": labels, "val_size": 0}
                rows.append(replace(one, values=values))
            scores[name] = tuple(rows)
        gap = gap_of(scores["other"], scores["scratch"])
        lines.append(Line("scratch", "", labels, "finetune", scores["scratch"], None))
        lines.append(Line("other", "", labels, "finetune", scores["other"], gap))
    return lines


def test_a_crossing_is_named_as_far_as_it_is_clear():
    assert describe_crossings("scratch", lines_crossing(0.1)) == "other crosses scratch at about 316 labels."
    unclear = describe_crossings("scratch", lines_crossing(3.0))
    assert unclear == "other may cross scratch between 100 and 1,000 labels."


ENDED = {"status": "done", "total_steps": 10, "flops_per_step": 1e9}


def test_a_bar_over_runs_that_are_scored_in_one_go_moves(tmp_path, capsys):
    jobs = [Job(name, tmp_path / name, ("finetune",), tmp_path, (), str(tmp_path)) for name in ("a", "b")]
    bar = Bar(jobs)
    bar.show(jobs)
    for job, share in zip(jobs, (0.5, 1.0), strict=True):
        job.folder.mkdir()
        (job.folder / "summary.json").write_text(json.dumps(ENDED))
        bar.show(jobs)
        assert bar._bar.n == share


def test_scoring_counts_as_the_least_run_until_it_says_its_work(tmp_path):
    entry = {"name": "scratch", "config": "x.yaml"}
    raw = {"run": {"name": "x"}, "data": {"path": "data"}, "entries": [entry], "reference": "scratch"}
    raw |= {"modes": ["finetune", "few_shot", "knn"], "labels_per_class": [5], "seeds": [0, 1]}
    matrix = Matrix(CompareConfig.model_validate(raw), tmp_path, tmp_path / "out")
    jobs = [cell.job for cell in matrix.cells(compute_of=False)]
    assert len(jobs) > 4
    bar = Bar(jobs)
    bar.show(jobs)
    trained = next(job for job in jobs if 'finetune.mode="finetune"' in job.arguments)
    trained.folder.mkdir(parents=True)
    (trained.folder / "summary.json").write_text(json.dumps(ENDED))
    bar.show(jobs)
    assert bar._bar.n == pytest.approx(1 / len(jobs)), "the others have not said how much they have to do"


def test_what_was_done_before_is_no_part_of_the_time_left(tmp_path):
    jobs = [Job(name, tmp_path / name, ("finetune",), tmp_path, (), str(tmp_path)) for name in "abcdef"]

    def finish(job: Job) -> None:
        job.folder.mkdir()
        (job.folder / "summary.json").write_text(json.dumps(ENDED))

    for job in (jobs[0], jobs[1], jobs[4]):
        finish(job)
    bar = Bar(jobs[:4], more=2)
    bar.show(jobs[2:4])
    for name in ("start_t", "last_print_t"):
        setattr(bar._bar, name, getattr(bar._bar, name) - 100)
    assert "01:40<?" in str(bar._bar)
    finish(jobs[2])
    bar.show(jobs[3:4])
    assert "01:40<05:00" in str(bar._bar)  # a sixth of it all in 100 s, three left as far as is known
    bar.add(jobs[4:])
    bar.show(jobs[3:4])
    assert "01:40<03:20" in str(bar._bar)  # one of the three had been done before


def test_the_terminal_shows_a_line_a_row_and_no_column_that_says_nothing():
    lines = lines_crossing(0.1)
    table = terminal_table(lines).splitlines()
    assert [" ".join(line.split()) for line in table] == [
        "row labels a class test accuracy points above",
        "scratch 100 50.0 % (± 0.0 over 3 seeds) reference",
        "other 100 40.0 % (± 1.0 over 3 seeds) -10.0",
        "scratch 1000 50.0 % (± 0.0 over 3 seeds) reference",
        "other 1000 60.0 % (± 1.0 over 3 seeds) +10.0",
    ]
    assert len({line.index(" %") for line in table[1:]}) == 1
    assert "labels a class" not in terminal_table(lines[:2])


def test_notes_stand_below_the_table_once():
    lines = [
        replace(line, note="nine times the labels" if line.entry == "other" else "")
        for line in lines_crossing(0.1)
    ]
    assert notes_of(lines) == ["other: nine times the labels."]


@pytest.mark.parametrize(
    ("held_out", "text"),
    [(20, "after images held out of its labels have chosen"), (0, "with no labeled image held out")],
)
def test_the_reading_says_whether_held_out_images_chose_the_epoch(held_out, text):
    rows = [*rows_of("scratch", [0.5, 0.6]), *rows_of("other", [0.7, 0.8])]
    rows = [replace(one, values=one.values | {"val_size": held_out}) for one in rows]
    config = config_of(rows)
    assert f"Each run reads them once, {text}" in _reading(config, lines_of(config, rows))[0]


def test_images_are_drawn_from_where_the_cells_prepared_them(tmp_path, digits, monkeypatch):
    """Not from a second copy in the user's cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_files(tmp_path / "photos", {f"{n % 2}/{n:03d}.jpg": encoded(picture(n)) for n in range(24)})
    config, own = matrix_on(tmp_path / "photos", tmp_path).config, tmp_path / "own"
    shards = data_of(config.model_copy(update={"set": {"data.cache_dir": str(own)}}))
    assert own in Path(shards).parents
    assert read_dataset(Path(shards)).classes == ["0", "1"]
    assert not (tmp_path / "cache").exists()
    assert data_of(matrix_on(digits, tmp_path).config) == str(digits)
