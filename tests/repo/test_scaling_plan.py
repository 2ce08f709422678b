"""The plan of docs/scaling.md: numbers by hand, and other inputs."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest
from helpers.commands import ROOT


@pytest.fixture(scope="module")
def plan():
    sys.path.insert(0, str(ROOT / "docs" / "tools"))
    import scaling_plan

    return scaling_plan


def test_the_page_holds_its_tables(plan):
    import tables

    text = (ROOT / "docs" / "scaling.md").read_text()
    filled, complaints = tables.fill("docs/scaling.md", text)
    assert not complaints, "\n".join(["run python docs/tools/tables.py --write", *complaints])
    assert filled == text
    assert not list(tables.missing_links("docs/scaling.md", text))
    assert all(f"<!-- table {name} -->" in text for name in plan.TABLES)


def test_a_reader_puts_in_other_numbers(plan):
    half = replace(plan.Inputs(), mfu=plan.Inputs().mfu / 2)
    costs = plan.costs_of("mae_large")
    assert plan.images_per_s(costs, half) * 2 == pytest.approx(plan.images_per_s(costs, plan.Inputs()))
    # GPU-hours by hand: images x FLOPs / rate.
    hours = 14.2e6 * 100 * costs.flops_per_image / (0.15 * 989e12) / 3600
    assert f"| {hours:,.0f} |" in plan.runs(half)
    for field, other in {
        "cores_per_gpu": 2,
        "full_size": 50.0,
        "network_gb_s": 1.0,
        "host_gb_s": 1.0,
    }.items():
        changed = replace(plan.Inputs(), **{field: other})
        tables = (plan.cores, plan.steps, plan.saves)
        assert [make(changed) for make in tables] != [make(plan.Inputs()) for make in tables], field


def test_sending_by_hand(plan):
    """Of ViT-L on 64 GPUs: a node's eight GPUs send through its eight cards together."""
    costs, inputs = plan.costs_of("mae_large"), plan.Inputs()
    (row,) = [line for line in plan.steps(inputs).splitlines() if line.startswith("| ViT-L/16 | 64 |")]
    computing = 64 / (0.30 * 989e12 / costs.flops_per_image)
    shares = [each * costs.parameters * 63 / 64 / (8 * 40e9) / computing for each in (8, 12)]
    assert row.split(" | ")[-2:] == [f"{shares[0]:.0%}", f"{shares[1]:.0%} |"]
    # With one card for a whole node ZeRO 0 sends for longer than it computes.
    one_card = plan.steps(replace(inputs, network_gb_s=5.0))
    assert f"| {8 * shares[0]:.0%} |" in one_card
    assert 8 * shares[0] > 1


def test_rates_are_those_of_result_files(plan):
    measured = json.loads((ROOT / "docs" / "results" / "loader.json").read_text())["results"]
    for field, row in {"full_size": "full", "small_256": "short256", "repeated": "repeats4"}.items():
        rate = measured[row]["images_per_s"]["ours"]
        assert getattr(plan.Inputs(), field) == rate
        assert f"| {rate:,.0f} |" in plan.cores(plan.Inputs())


def test_states_by_hand(plan):
    """ViT-H: recomputation leaves next to none of the weights' bf16 copies; ZeRO 3 keeps all weights gathered."""
    costs = plan.costs_of("mae_huge")
    whole, few = (plan.kept_of("mae_huge", recomputed=on)[1] for on in (False, True))
    assert whole == pytest.approx(2 * costs.parameters, rel=0.01)
    assert few < 0.05 * whole
    lines = [line.split(" | ") for line in plan.states(plan.Inputs()).splitlines()]
    gib_by_stage = {int(line[1]): float(line[4]) for line in lines if line[0] == "| ViT-H/14"}
    # On 512 GPUs: weights, gradients and two moments; weights and two buckets of 25 million, and 1/512 of the rest.
    assert gib_by_stage[0] == pytest.approx(16 * costs.parameters / 2**30, abs=0.06)
    assert gib_by_stage[3] == pytest.approx(
        (4 * (costs.parameters + 50e6) + 20 * costs.parameters / 512) / 2**30, abs=0.06
    )


def test_an_option_that_is_none_is_refused():
    ended = subprocess.run(
        [sys.executable, "docs/tools/scaling_plan.py", "--gpu-per-node", "4"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 2
    assert "--gpu-per-node" in ended.stderr
