"""What ranks send each other in a step, counted, is what the table of docs/scaling.md says."""

import json
import os

import pytest
from helpers.commands import ROOT, run

from mae_vit.runtime.ranks import free_port

WORKER = ROOT / "tests/workers/traffic.py"
# For each parameter, by ZeRO stage or engine. Gradients go twice around the ring in float32, and float32 weights once
# at ZeRO 1 and 2; at ZeRO 3 weights once and gradients once. The torch engine sends gradients alone.
BYTES = {"0": 8.0, "1": 12.0, "2": 12.0, "3": 8.0, "torch": 8.0}


@pytest.mark.slow
@pytest.mark.distributed
def test_bytes_of_each_stage_and_when_they_are_sent():
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}"]
    ended = run(*launcher, str(WORKER), *BYTES, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert ended.returncode == 0, ended.stderr[-3000:]
    traffic = json.loads(ended.stdout.partition("RESULT ")[2].splitlines()[0])
    for stage, each in BYTES.items():
        # Norms and flags are sent besides, and small parts are padded.
        assert traffic[stage]["bytes"] == pytest.approx(each, rel=0.02), stage
        # At ZeRO 3 too: what the forward pass gathers stays until the backward pass.
        assert traffic[stage]["whole_after_forward"] == 1, stage
    for engine in ("0", "torch"):
        # The small first bucket, long before the backward pass ends; the rest is one more bucket of this small network.
        assert traffic[engine]["early"] > 1, engine
        assert traffic[engine]["graphs"] > 1, engine
        # DistributedDataParallel reads the host's list of used parameters, one by one: no GPU takes part.
        assert traffic[engine]["waits"] == {"_local_scalar_dense": traffic[engine]["tensors"]}, engine
