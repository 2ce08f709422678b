"""The same runs give the same numbers as before a refactoring (tests/golden/record.py records them)."""

import json

import pytest
from golden.record import ENGINES, PRETRAINING, RECORD, golden_runs, machine


def test_one_short_run_has_the_losses_recorded(tmp_path):
    check(golden_runs(tmp_path, names=["mae_digits"], engines=["torch"]))


@pytest.mark.slow
@pytest.mark.distributed
def test_losses_and_files_are_those_recorded(tmp_path):
    runs = golden_runs(tmp_path)
    assert len(runs) == (len(PRETRAINING) + 1) * len(ENGINES)
    check(runs)


def check(runs):
    recorded = json.loads(RECORD.read_text())
    for name, run in runs.items():
        assert len(run["losses"]) == 20
        # Other processors round otherwise.
        assert run["losses"] == pytest.approx(recorded["runs"][name]["losses"], rel=1e-3), name
        if machine() == recorded["machine"]:
            assert run == recorded["runs"][name]
