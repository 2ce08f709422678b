"""What ranks send each other in a step, counted, is what docs/scaling.md computes with."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest
from helpers.commands import ROOT

from mae_vit.runtime.ranks import free_port

WORKER = ROOT / "tests/workers/traffic.py"


@pytest.mark.slow
@pytest.mark.distributed
def test_bytes_of_each_stage():
    spec = importlib.util.spec_from_file_location(
        "scaling_plan_of_traffic", ROOT / "docs" / "tools" / "scaling_plan.py"
    )
    plan = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = plan  # dataclasses look themselves up there
    spec.loader.exec_module(plan)
    # The torch engine sends gradients alone, twice around: as ZeRO 0, or in half the bytes.
    expected = {str(stage): each for stage, each in plan._WIRE_BYTES.items()} | {
        "torch": 8.0,
        "torch:bf16": 4.0,
    }
    port = f"--master-port={free_port()}"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", port, str(WORKER)]
    ended = subprocess.run(
        [*launcher, *expected],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    traffic = json.loads(ended.stdout.partition("RESULT ")[2].splitlines()[0])
    for stage, each in expected.items():
        # Norms and flags are sent besides, and small parts are padded.
        assert traffic[stage]["bytes"] == pytest.approx(each, rel=0.02), stage
        # At ZeRO 3 too: what the forward pass gathers stays until the backward pass.
        assert traffic[stage]["whole_after_forward"] == 1, stage
