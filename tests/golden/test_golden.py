"""The same runs give the same numbers as before a refactoring (tests/golden/record.py records them)."""

import json

import pytest
from golden.record import ENGINES, PRETRAINING, RECORD, golden_runs, machine


@pytest.mark.slow
@pytest.mark.distributed
def test_losses_and_files_are_those_recorded(tmp_path):
    recorded = json.loads(RECORD.read_text())
    runs = golden_runs(tmp_path)
    assert len(runs) == (len(PRETRAINING) + 1) * len(ENGINES)
    assert runs.keys() == recorded["runs"].keys()
    for name, run in runs.items():
        assert len(run["losses"]) == 20
        # Other processors round otherwise.
        assert run["losses"] == pytest.approx(recorded["runs"][name]["losses"], rel=1e-3), name
    if machine() == recorded["machine"]:
        assert runs == recorded["runs"]
