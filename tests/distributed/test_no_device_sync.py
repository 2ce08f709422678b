"""The loop gives a device its work and reads nothing back but what is a step old, and log lines."""

import json
import subprocess
import sys

import pytest
import torch
from helpers.commands import ROOT
from workers.device_sync import OPTIONS, counted, step_options, take_steps, torch_engine

WORKER = ROOT / "tests/workers/device_sync.py"
STAGES = [(name, 0) for name in OPTIONS] + [("mae", 1), ("mae", 2), ("mae", 3)]
# In four steps of two groups of parameters, whose norms DeepSpeed 0.19 looks at one by one at ZeRO 1
# and 2, together at 3; with float32 parameters it has no switch for it.
PINNED = {
    1: {"_local_scalar_dense": 12, "lift_fresh": 8},
    2: {"_local_scalar_dense": 12, "lift_fresh": 8},
    3: {"_local_scalar_dense": 4, "lift_fresh": 8},
}


@pytest.fixture(scope="module")
def deepspeed():
    arguments = [sys.executable, WORKER, json.dumps(STAGES)]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-2000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("RESULT"))
    return dict(zip(STAGES, json.loads(line.removeprefix("RESULT")), strict=True))


@pytest.mark.parametrize("name", OPTIONS)
def test_nothing_waits_for_the_device_between_log_steps(name):
    engine = torch_engine(name)
    with counted() as waits:
        lines = take_steps(engine, 4, log_every=100)
    assert not lines
    assert waits == {}


@pytest.mark.distributed
@pytest.mark.parametrize("name", OPTIONS)
def test_nothing_waits_at_zero_0(deepspeed, name):
    assert deepspeed[name, 0] == {"found": {}, "lines": []}


@pytest.mark.distributed
@pytest.mark.parametrize("stage", PINNED)
def test_waits_of_other_stages_do_not_grow(deepspeed, stage):
    assert deepspeed["mae", stage]["found"] == PINNED[stage]


def test_what_waits_is_found():
    with counted() as waits:
        values = torch.tensor([1.0, 2.0])
        values.sum().item()
        bool(values.isfinite().all())
        values[values > 1]
        torch.cuda.synchronize()
    assert waits == {"lift_fresh": 1, "_local_scalar_dense": 2, "index": 1, "synchronize": 1}


def test_log_steps_are_logged():
    lines = take_steps(torch_engine("mae"), 4, log_every=2)
    assert [line["step"] for line in lines] == [2, 4]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_ranks_exchange_beside_the_backward_pass_on_gpus(stage):
    from mae_vit.training.engines.deepspeed_engine import deepspeed_config

    def exchange(numbers: int, device: str) -> dict:
        options = step_options(stage)
        return deepspeed_config(options, trainable=numbers, device=torch.device(device))["zero_optimization"]

    large = exchange(10**9, "cuda")
    assert large["overlap_comm"]
    assert 25e6 <= large["reduce_bucket_size"] <= 50e6
    assert 25e6 <= large["allgather_bucket_size"] <= 50e6
    assert exchange(1000, "cuda")["reduce_bucket_size"] == 1000
    # On a CPU numbers stay what they were: one bucket, after the pass.
    assert exchange(10**8, "cpu")["reduce_bucket_size"] == 10**8
    assert "overlap_comm" not in exchange(10**8, "cpu")
