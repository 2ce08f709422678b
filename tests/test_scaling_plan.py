"""docs/scaling.md: its tables are what its script makes of the committed measurements."""

import importlib.util
import json
import subprocess
import sys
from dataclasses import replace

import pytest
from commands import ROOT


@pytest.fixture(scope="module")
def plan():
    spec = importlib.util.spec_from_file_location("scaling_plan", ROOT / "docs" / "scaling_plan.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def measured(plan):
    return json.loads(plan.MEASURED.read_text())["results"]


def test_the_page_holds_what_the_script_prints(plan, measured):
    page = plan.PAGE.read_text()
    assert plan.fill(page, plan.Inputs(), measured) == page
    for name, make in plan.TABLES.items():
        assert page.count(f"<!-- table {name} -->\n{make(plan.Inputs(), measured)}\n<!-- end -->") == 1, name


def test_a_reader_puts_in_other_numbers(plan):
    half = replace(plan.Inputs(), mfu=plan.Inputs().mfu / 2)
    costs = plan.costs_of("mae_large")
    assert plan.images_per_s(costs, half) * 2 == pytest.approx(plan.images_per_s(costs, plan.Inputs()))
    # GPU-hours by hand: images x FLOPs / rate.
    hours = 14.2e6 * 100 * costs.flops_per_image / (0.2 * 790e12) / 3600
    assert f"| {hours:,.0f} |" in plan.runs(half, {})
    for field, other in {
        "cores_per_gpu": 2,
        "full_size": 50.0,
        "network_gb_s": 1.0,
        "host_gb_s": 1.0,
    }.items():
        changed = replace(plan.Inputs(), **{field: other})
        tables = (plan.cores, plan.steps, plan.saves)
        assert [make(changed, {}) for make in tables] != [make(plan.Inputs(), {}) for make in tables], field


def test_an_option_that_is_none_is_refused():
    ended = subprocess.run(
        [sys.executable, "docs/scaling_plan.py", "--gpu-per-node", "4"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 2
    assert "--gpu-per-node" in ended.stderr
