"""The run folder's files: JSON that every reader takes."""

import json
import math

from mae_vit.core.files import read_json_lines
from mae_vit.training.outputs.run_folder import RunFolder


def refuse(word: str) -> None:
    raise AssertionError(f"{word} is no JSON")


def test_numbers_that_are_not_finite_are_null(tmp_path):
    folder = RunFolder(tmp_path)
    folder.append_metrics({"step": 1, "loss": math.nan, "heldout": {"psnr_db": -math.inf, "loss": 0.5}})
    expected = [{"step": 1, "loss": None, "heldout": {"psnr_db": None, "loss": 0.5}}]
    lines = [json.loads(line, parse_constant=refuse) for line in folder.metrics.read_text().splitlines()]
    assert lines == expected
    folder.write_summary("done", {"scores": (1.5, math.inf)})
    summary = json.loads(folder.summary.read_text(), parse_constant=refuse)
    assert summary == {"status": "done", "scores": [1.5, None]}


def test_lines_that_were_cut_short_are_passed_over(tmp_path):
    folder = RunFolder(tmp_path)
    folder.append_metrics({"step": 1, "loss": 0.5})
    with folder.metrics.open("ab") as file:
        file.write(b'{"step": 2, "lo')  # a full disk
    folder.append_metrics({"step": 3, "loss": 0.25})
    assert read_json_lines(folder.metrics) == [{"step": 1, "loss": 0.5}, {"step": 3, "loss": 0.25}]
    assert folder.cut_metrics(2) == {"step": 1, "loss": 0.5}
    assert read_json_lines(folder.metrics) == [{"step": 1, "loss": 0.5}]


def test_metrics_are_cut_where_they_lie(tmp_path):
    """A copy would take room, which a full disk has not when a run goes back."""
    folder = RunFolder(tmp_path)
    assert folder.cut_metrics(1) is None
    for step in (1, 2, 3):
        folder.append_metrics({"step": step})
    before = folder.metrics.stat().st_ino
    assert folder.cut_metrics(2) == {"step": 2}
    assert folder.metrics.read_text() == '{"step": 1}\n{"step": 2}\n'
    assert folder.metrics.stat().st_ino == before
    assert folder.cut_metrics(0) is None
    assert folder.metrics.read_text() == ""
