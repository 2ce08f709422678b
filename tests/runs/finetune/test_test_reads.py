"""The ledger of the test split: how many weights of a run folder were measured on it."""

import json


def reads_of(folder) -> int:
    return json.loads((folder / "summary.json").read_text())["test_reads"]


def test_each_length_of_a_run_that_is_tested_counts(call, tmp_path):
    folder = tmp_path / "run"
    assert call() == 0
    assert reads_of(folder) == 1
    assert call("train.steps=9", "--extend") == 0
    assert reads_of(folder) == 2
    assert len(json.loads((folder / "test_reads.json").read_text())) == 2


def test_the_same_weights_are_counted_once(call, tmp_path):
    """A run that was killed while it wrote its results measures its last checkpoint again."""
    folder = tmp_path / "run"
    assert call() == 0
    summary = json.loads((folder / "summary.json").read_text())
    (folder / "summary.json").write_text(json.dumps(summary | {"status": "running"}))
    assert call() == 0
    assert reads_of(folder) == 1


def test_without_a_test_nothing_is_counted(call, tmp_path):
    # The split is named in the run's identity all the same: data may have several, and one without labels.
    assert call("finetune.test=false", "finetune.test_split=test") == 0
    assert not (tmp_path / "run" / "test_reads.json").exists()
