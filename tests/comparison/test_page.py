"""What a report says of the data behind it, and a bar of runs that take no steps."""

import json
import shutil

from finetune.comparison.config import CompareConfig
from finetune.comparison.jobs import Bar, Job
from finetune.comparison.matrix import Matrix
from finetune.comparison.page import write_page, write_text
from mae_vit.data.dataset import read_dataset


def matrix_on(data, tmp_path) -> Matrix:
    entry = {"name": "scratch", "config": "x.yaml"}
    raw = {"run": {"name": "x"}, "data": {"path": str(data)}, "entries": [entry], "reference": "scratch"}
    raw["pretrain"] = {"MAE": {"config": "y.yaml"}}
    return Matrix(CompareConfig.model_validate(raw), tmp_path, tmp_path / "out")


def test_a_report_says_what_pretraining_was_spared(digits, tmp_path):
    data = shutil.copytree(digits, tmp_path / "data", ignore=shutil.ignore_patterns(".index"))
    matrix = matrix_on(data, tmp_path)
    assert "was pretrained on images without" not in write_text(matrix, [], []) + write_page(matrix, [], [])
    described = json.loads((data / "dataset.json").read_text())
    told = {"source": "cifar10:test", "hash": "pHash of 64 bits", "distance": 4, "samples": 1234}
    described["splits"]["train"]["processing"] = {"excluded": [told]}
    (data / "dataset.json").write_text(json.dumps(described))
    assert read_dataset(data).splits["train"].processing.excluded
    for text in (write_text(matrix, [], []), write_page(matrix, [], [])):
        assert (
            "MAE was pretrained on images without 1,234 that cifar10:test has too (pHash of 64 bits," in text
        )
    shutil.rmtree(data)
    assert "# x" in write_text(matrix, [], [])


def test_a_bar_over_runs_that_are_scored_in_one_go_moves(tmp_path, capsys):
    jobs = [Job(name, tmp_path / name, "finetune/run.py", tmp_path, (), tmp_path) for name in ("a", "b")]
    bar = Bar(jobs)
    bar.show(jobs)
    for job, share in zip(jobs, (0.5, 1.0), strict=True):
        job.folder.mkdir()
        (job.folder / "summary.json").write_text('{"status": "done"}')
        bar.show(jobs)
        assert bar._bar.n == share
