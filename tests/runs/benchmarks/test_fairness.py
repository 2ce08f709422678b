"""What benchmarks conclude from times: means of pairs with an interval, and the fastest of equal peers."""

import statistics
import subprocess
import sys

import pytest
from helpers.commands import ROOT

from benchmarks.engine import BARE, compare, judge, window
from benchmarks.harness.turns import mean_difference
from benchmarks.harness.workloads import TINY
from mae_vit.core.errors import InputError


def test_a_mean_counts_what_one_round_in_many_costs():
    differences = [1.0] * 19 + [21.0]
    told = mean_difference(differences)
    assert told["mean"] == 2.0
    assert told["median"] == 1.0
    error = statistics.stdev(differences) / 20**0.5
    assert told["standard_error"] == pytest.approx(error, abs=1e-3)
    # t of 19 degrees of freedom, by any table.
    assert told["interval_95"] == pytest.approx([2 - 2.093 * error, 2 + 2.093 * error], abs=2e-3)
    with pytest.raises(ValueError, match="two rounds"):
        mean_difference([1.0])


def test_a_limit_within_the_interval_is_neither_met_nor_missed():
    assert [judge([0.2, 0.8], 1), judge([0.4, 1.5], 1), judge([1.2, 1.5], 1)] == [
        "met",
        "unresolved",
        "missed",
    ]
    results = compare({BARE: [10.0, 20.0, 30.0], "torch": [10.4, 20.6, 30.5]})
    assert results["torch"]["turns_ms"] == [10.4, 20.6, 30.5]
    assert results["torch"]["ms_over_bare"]["mean"] == 0.5
    assert results["torch"]["verdict"] == "met"


def test_a_turn_is_a_whole_window_of_the_log():
    assert window(TINY, None) == 20
    assert window(TINY, 40) == 40
    with pytest.raises(InputError, match="multiple of monitor"):
        window(TINY, 30)


def test_steps_that_cut_a_window_are_refused():
    command = [sys.executable, "benchmarks/engine.py", "--steps", "1"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 2
    assert ended.stderr.startswith("error: --steps 1: a multiple")
