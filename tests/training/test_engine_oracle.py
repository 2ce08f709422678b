"""Every engine against a plain PyTorch loop."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from oracle_worker import BATCH, STEPS, batch_of, build_objective, rate

WORKER = Path(__file__).with_name("oracle_worker.py")


def plain_loop(clip: float = 0.0, precision: str = "fp32") -> tuple[list[float], list[float]]:
    """Thirty lines that share nothing with the engines but the objective."""
    torch.set_num_threads(1)
    model = build_objective()
    for module in model.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = False
    trained = [p for p in model.parameters() if p.requires_grad]
    decayed, kept = [p for p in trained if p.ndim > 1], [p for p in trained if p.ndim <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.05}, {"params": kept, "weight_decay": 0.0}],
        lr=0.0,
        betas=(0.9, 0.95),
        eps=1e-8,
        fused=True,
    )
    losses, norms = [], []
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            loss = model(batch_of(step)).loss
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in trained])
        if clip:
            norm = torch.nn.utils.clip_grad_norm_(trained, clip)
        optimizer.step()
        losses.append(loss.item())
        norms.append(norm.item())
    return losses, norms


def through_engine(engine: str, *, ranks: int = 1, zero: int = 0, precision="fp32", accumulation=1, clip=0.0):
    port = 20_000 + os.getpid() % 20_000
    processes = [
        subprocess.Popen(
            [sys.executable, WORKER, engine, str(zero), precision, str(accumulation), str(clip)],
            env=os.environ
            | {
                "RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "LOCAL_RANK": str(rank),
                "LOCAL_WORLD_SIZE": str(ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    outputs = [process.communicate(timeout=120) for process in processes]
    for process, (_, errors) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, errors[-2000:]
    line = next(line for line in outputs[0][0].splitlines() if line.startswith("RESULT"))
    found = json.loads(line.removeprefix("RESULT"))
    return found["losses"], found["norms"]


def test_the_oracle_learns():
    losses, norms = plain_loop()
    assert len(losses) == STEPS
    assert losses[-1] < 0.9 * losses[0]
    assert min(norms) > 0
    assert BATCH == 16


@pytest.mark.distributed
@pytest.mark.parametrize("engine", ["torch", "deepspeed"])
@pytest.mark.parametrize("clip", [0.0, 0.1])
def test_one_rank_zero_0_is_bit_equal(engine, clip):
    expected_losses, expected_norms = plain_loop(clip)
    losses, norms = through_engine(engine, clip=clip)
    assert losses == expected_losses
    assert norms == expected_norms
    if clip:
        assert min(norms) > clip  # so that clipping was at work
        assert losses != plain_loop()[0]


@pytest.mark.distributed
@pytest.mark.parametrize("engine", ["torch", "deepspeed"])
def test_bf16_is_bit_equal_too(engine):
    assert through_engine(engine, precision="bf16")[0] == plain_loop(precision="bf16")[0]


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("ranks", "zero", "accumulation", "clip"),
    [(1, 1, 1, 0.1), (2, 0, 1, 0.1), (2, 1, 1, 0.1), (2, 0, 2, 0.0), (2, 1, 2, 0.0)],
)
def test_other_splits_agree_to_rounding(ranks, zero, accumulation, clip):
    expected_losses, expected_norms = plain_loop(clip)
    losses, norms = through_engine("deepspeed", ranks=ranks, zero=zero, accumulation=accumulation, clip=clip)
    assert losses == pytest.approx(expected_losses, rel=1e-6)
    assert norms == pytest.approx(expected_norms, rel=1e-4)


@pytest.mark.distributed
def test_accumulation_on_the_torch_engine():
    assert through_engine("torch", accumulation=4)[0] == pytest.approx(plain_loop()[0], rel=1e-6)
