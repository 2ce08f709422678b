"""Every engine, ZeRO stage, optimizer and precision against a plain PyTorch loop."""

import json
import math
import os
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from functools import partial

import pytest
import torch
from helpers.commands import ROOT
from timm.optim import muon
from timm.optim.lars import Lars
from workers.plain_loop import (
    BATCH,
    CASE,
    GROWTH_INTERVAL,
    OPTIMIZERS,
    STEPS,
    WEIGHT_DECAY,
    batch_of,
    build_objective,
    rate,
)

from mae_vit.runtime.ranks import free_port

WORKER = ROOT / "tests/workers/plain_loop.py"
NEWTON_SCHULZ = muon.zeropower_via_newtonschulz

# One process, where the same operations run in the same order: equal bit for bit. ZeRO 3
# replaces torch.nn.functional.linear for good, so that it has no place among them.
BIT_EQUAL = {
    f"{engine}: {name}": {"engines": [engine], **changes}
    for engine in ("torch", "0")
    for name, changes in {
        "plain": {},
        "clipped": {"clip": 0.1},
        "bf16": {"precision": "bf16"},
        "fp16": {"precision": "fp16"},
        "fp16 that overflows": {"precision": "fp16", "scale": 2.0**23, "clip": 0.1},
        "recomputed": {"recompute": True},
        # timm's Muon has other kernels than ours.
        **{name: {"optimizer": name} for name in OPTIMIZERS if name not in ("adamw", "muon")},
        "averaged": {"ema": 0.8},
    }.items()
} | {
    "handed over": {"engines": ["torch", "0", "torch", "0"]},
    "handed over, fp16": {"engines": ["0", "torch"], "precision": "fp16", "scale": 2.0**23},
    "handed over, averaged": {"engines": ["0", "torch"], "ema": 0.8},
    "handed over, sgd": {"engines": ["0", "torch"], "optimizer": "sgd"},
}
ONE_RANK = {
    "accumulation": {"accumulation": 4},
    "ZeRO 1": {"engines": ["1"], "clip": 0.1},
    "ZeRO 2": {"engines": ["2"], "clip": 0.1},
    "averaged": {"engines": ["1", "2"], "ema": 0.8},
    "ZeRO 3": {"engines": ["3"], "clip": 0.1},
    "every stage in turn": {"engines": ["1", "3", "torch", "2", "0"]},
    "ZeRO 1, fp16": {"engines": ["1"], "precision": "fp16", "scale": 2.0**23},
    "ZeRO 3, fp16": {"engines": ["3"], "precision": "fp16", "scale": 2.0**23},
}
TWO_RANKS = {
    "ZeRO 0": {"engines": ["0"], "clip": 0.1},
    "ZeRO 1, accumulation": {"engines": ["1"], "accumulation": 2},
    "ZeRO 2": {"engines": ["2"], "clip": 0.1, "accumulation": 2},
    "ZeRO 3": {"engines": ["3", "3"], "clip": 0.1, "recompute": True},
    "every stage in turn": {"engines": ["1", "3", "2", "0"], "optimizer": "sgd"},
    "averaged": {"engines": ["2", "0", "1"], "ema": 0.8},
    "ZeRO 3, joint": {"engines": ["3", "0"], "objective": "joint"},
}
DATA_PARALLEL = {
    f"torch: {name}": {"engines": ["torch"], **changes}
    for name, changes in {
        "plain": {},
        "clipped, accumulation": {"clip": 0.1, "accumulation": 4},
        "averaged": {"ema": 0.8},
        "joint": {"objective": "joint", "accumulation": 2},
        "compiled, recomputed": {"compile": True, "recompute": True, "accumulation": 2},
        **{name: {"optimizer": name} for name in ("sgd", "lars", "muon")},
    }.items()
} | {
    "handed over": {"engines": ["torch", "0", "torch", "2", "3"], "clip": 0.1},
    "handed over, fp16": {"engines": ["1", "torch"], "precision": "fp16", "scale": 2.0**23},
    "handed over, averaged": {"engines": ["0", "torch", "2"], "ema": 0.8},
    "handed over, muon": {"engines": ["torch", "0", "torch"], "clip": 0.1, "optimizer": "muon"},
}
# Held against one another alone: statistics of half a batch are not those of the batch, and the
# gradients of half a batch, twice as large, overflow earlier.
PEERS = {
    "normed": {"objective": "normed", "optimizer": "sgd", "ema": 0.8},
    "normed, accumulation": {"objective": "normed", "optimizer": "sgd", "accumulation": 2},
    "fp16 that overflows": {"precision": "fp16", "scale": 2.0**23, "clip": 0.1, "accumulation": 2},
}
PEER_ENGINES = {"torch": ["torch"], "0": ["0"], "torch, 0": ["torch", "0"]}
THREE_RANKS = {
    "straight": {"engines": ["torch"]},
    "resumed": {"engines": ["torch", "torch"]},
}
SHARDED = [name for name in OPTIMIZERS if name not in ("lars", "muon")]
GRID = {
    f"ZeRO {stage}, {name}": {"engines": [stage, stage], **changes}
    for stage in ("0", "1", "2", "3")
    for name, changes in {
        **{name: {"optimizer": name} for name in SHARDED},
        **{f"{name}, accumulation": {"optimizer": name, "accumulation": 2} for name in ("adam", "sgd")},
        "clipped": {"clip": 0.1},
        **{name: {"objective": name} for name in ("masked_patch", "supervised", "simmim", "joint")},
        "recomputed": {"recompute": True},
        "fp16": {"precision": "fp16"},
        "bf16": {"precision": "bf16"},
    }.items()
} | {"ZeRO 0, lars": {"engines": ["0", "0"], "optimizer": "lars"}}
GRID = {
    f"torch: {name}": {"engines": ["torch", "torch"], **changes}
    for name, changes in {
        **{name: {"optimizer": name, "accumulation": 2} for name in OPTIMIZERS},
        **{name: {"objective": name} for name in ("masked_patch", "supervised", "simmim")},
        "recomputed": {"recompute": True},
        "compiled, joint": {"compile": True, "objective": "joint"},
        "fp16": {"precision": "fp16"},
        "bf16": {"precision": "bf16"},
    }.items()
} | GRID


def plain_muon(model: torch.nn.Module) -> torch.optim.Optimizer:
    """timm's, whose products are bfloat16 unless it is told otherwise."""
    muon.zeropower_via_newtonschulz = partial(NEWTON_SCHULZ, dtype=torch.float32)
    groups = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            kind = parameter.ndim > 1, parameter.ndim == 2 and "blocks." in name
            groups.setdefault(kind, []).append(parameter)
    return muon.Muon(
        [
            # timm's Adam would have Nesterov's momentum too.
            {"params": each, "weight_decay": WEIGHT_DECAY * decays, "use_muon": matrix, "nesterov": matrix}
            for (decays, matrix), each in groups.items()
        ],
        eps=1e-8,
    )


def plain_optimizer(case: dict, decayed: list, kept: list) -> torch.optim.Optimizer:
    name = case["optimizer"]
    options, _ = OPTIMIZERS[name]
    groups = [{"params": decayed, "weight_decay": WEIGHT_DECAY}, {"params": kept, "weight_decay": 0.0}]
    if name in ("adamw", "adam"):
        kind = torch.optim.AdamW if name == "adamw" else torch.optim.Adam
        return kind(groups, lr=0.0, fused=True, **options)
    if name == "lars":
        return Lars(groups, lr=0.0, momentum=0.9)
    return torch.optim.SGD(groups, lr=0.0, **options)


def plain_loop(**changes) -> dict:
    """Forty lines that share nothing with the engines but objective and schedule."""
    case = CASE | changes
    torch.set_num_threads(1)
    model = build_objective(case["objective"])
    for module in model.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = False
    trained = [p for p in model.parameters() if p.requires_grad]
    by_decay = [p for p in trained if p.ndim > 1], [p for p in trained if p.ndim <= 1]
    optimizer = plain_muon(model) if case["optimizer"] == "muon" else plain_optimizer(case, *by_decay)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(case["precision"])
    scaler = torch.amp.GradScaler(
        "cpu",
        init_scale=case["scale"],
        growth_interval=GROWTH_INTERVAL,
        enabled=case["precision"] == "fp16",
    )
    losses, norms = [], []
    average = [p.detach().clone() for p in model.parameters()]
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = rate(step, case)
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            loss = model(batch_of(step)).loss
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = torch.nn.utils.get_total_norm([p.grad for p in trained])
        if case["clip"]:
            norm = torch.nn.utils.clip_grad_norm_(trained, case["clip"])
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
        norms.append(norm.item())
        decay = min(case["ema"] or 0.0, (2 + step) / (11 + step))
        for kept, parameter in zip(average, model.parameters(), strict=True):
            kept.mul_(decay).add_(parameter.detach(), alpha=1 - decay)
    with torch.no_grad():
        for kept, parameter in zip(average, model.parameters(), strict=True):
            parameter.copy_(kept)
        sums = model.evaluation_sums(batch_of(STEPS))
    evaluation = model.evaluation_metrics({name: float(value) for name, value in sums.items()})
    return {"losses": losses, "norms": norms, "scale": scaler.get_scale(), "evaluation": evaluation}


def through_engines(cases: dict[str, dict], *, ranks: int = 1) -> dict[str, dict]:
    """Runs all cases in one go: importing DeepSpeed takes longer than any of them."""
    place = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    words = [sys.executable, WORKER, json.dumps(list(cases.values()))]
    with ExitStack() as stack:
        # Files, because a rank that fills a pipe waits for its reader, and the other ranks for it.
        files = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(ranks)]
        processes = []
        for rank, file in enumerate(files):
            own = os.environ | place | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            processes.append(subprocess.Popen(words, env=own, stdout=file, stderr=subprocess.STDOUT))
        try:
            codes = [process.wait(timeout=500) for process in processes]
        finally:
            for process in processes:
                process.kill()
        outputs = []
        for file in files:
            file.seek(0)
            outputs.append(file.read())
    for code, output in zip(codes, outputs, strict=True):
        assert code == 0, output[-2000:]
    line = next(line for line in outputs[0].splitlines() if line.startswith("RESULT"))
    return dict(zip(cases, json.loads(line.removeprefix("RESULT")), strict=True))


PEER_CASES = {
    f"{engine}: {name}": {"engines": engines, **case}
    for engine, engines in PEER_ENGINES.items()
    for name, case in PEERS.items()
}
# Cases that run in one go, and their number of ranks. All of the grid take longer than a test may.
GROUPS = {
    "bit equal": (BIT_EQUAL, 1),
    "one rank": (ONE_RANK, 1),
    "two ranks": (PEER_CASES | DATA_PARALLEL | TWO_RANKS, 2),
    "three ranks": (THREE_RANKS, 3),
    **{
        f"grid {engine}": ({name: case for name, case in GRID.items() if case["engines"][0] == engine}, 2)
        for engine in ("torch", "0", "1", "2", "3")
    },
}


@pytest.fixture(scope="module")
def runs():
    """Runs the cases of a group when the first of them is asked for: runs(group) -> results by name."""
    finished = {}

    def results(group: str) -> dict[str, dict]:
        if group not in finished:
            finished[group] = {}  # also if it fails: once is enough
            cases, ranks = GROUPS[group]
            finished[group] = through_engines(cases, ranks=ranks)
        return finished[group]

    return results


def without_engines(case: dict) -> dict:
    no_matter = ("engines", "accumulation", "recompute", "compile")
    return {key: value for key, value in case.items() if key not in no_matter}


def assert_agrees(run: dict, case: dict) -> None:
    expected = plain_loop(**without_engines(case))
    # In half precision, another order of sums in float32 rounds some number the other way.
    tolerance = {"fp32": 1e-6, "fp16": 2e-3, "bf16": 1e-2}[case.get("precision", "fp32")]
    assert run["losses"] == pytest.approx(expected["losses"], rel=tolerance)
    if tolerance == 1e-6:
        assert run["norms"] == pytest.approx(expected["norms"], rel=1e-4)
        assert run["evaluation"] == pytest.approx(expected["evaluation"], rel=1e-4, abs=1e-5)
    if case.get("precision") == "fp16":
        assert run["skips"] == [not math.isfinite(norm) for norm in expected["norms"]]
        assert run["scale"] == expected["scale"]


def test_the_oracle_learns_and_its_options_matter():
    plain = plain_loop()
    assert len(plain["losses"]) == STEPS
    assert plain["losses"][-1] < 0.9 * plain["losses"][0]
    assert min(plain["norms"]) > 0
    assert BATCH == 16
    ends = {
        repr(case): (run["losses"][-1], run["evaluation"]["loss"])
        for case in BIT_EQUAL.values()
        for run in [plain_loop(**without_engines(case))]
    }
    expected = {repr(without_engines(case)) for case in BIT_EQUAL.values()}
    # Nothing but the engine, the split and recomputation leaves the oracle as it is.
    assert len(set(ends.values())) == len(expected)
    overflowing = plain_loop(**without_engines(BIT_EQUAL["0: fp16 that overflows"]))["norms"]
    assert 2 <= sum(math.isfinite(norm) for norm in overflowing) <= STEPS - 2


@pytest.mark.distributed
@pytest.mark.parametrize("name", BIT_EQUAL)
def test_one_rank_zero_0_is_bit_equal(runs, name):
    case, run = BIT_EQUAL[name], runs("bit equal")[name]
    expected = plain_loop(**without_engines(case))
    assert run["losses"] == expected["losses"]
    good = [norm for norm in expected["norms"] if math.isfinite(norm)]
    assert [norm for norm in run["norms"] if math.isfinite(norm)] == good
    assert run["skips"] == [not math.isfinite(norm) for norm in expected["norms"]]
    if case.get("precision") == "fp16":
        assert run["scale"] == expected["scale"]
    if case.get("clip"):
        assert min(good) > case["clip"]  # so that clipping was at work


AGREE = [
    *[("one rank", name) for name in ONE_RANK],
    *[("two ranks", name) for name in (*TWO_RANKS, *DATA_PARALLEL)],
    *[
        pytest.param(f"grid {case['engines'][0]}", name, marks=pytest.mark.slow)
        for name, case in GRID.items()
    ],
]


@pytest.mark.distributed
@pytest.mark.parametrize(("group", "name"), AGREE)
def test_engines_agree_to_rounding(runs, group, name):
    case, run = GROUPS[group][0][name], runs(group)[name]
    assert_agrees(run, case)
    if group == "two ranks" and name in TWO_RANKS:
        # Rank 0 alone has the gathered state.
        held, elsewhere = run["held"]
        assert held > 40
        assert (elsewhere, run["copied"]) == (0, [held, 0])
    elif group == "two ranks":
        assert run["apart"] == 0.0
        if case["engines"][0] == "torch":
            # Nothing is sent before the last micro-batch.
            assert run["shared"] == [False] * (case.get("accumulation", 1) - 1) + [True]


@pytest.mark.distributed
@pytest.mark.parametrize("name", PEERS)
def test_statistics_and_overflows_are_those_of_deepspeed(runs, name):
    expected = runs("two ranks")[f"0: {name}"]
    if "fp16" in name:
        assert 2 <= sum(expected["skips"]) <= STEPS - 2
    else:
        assert expected["evaluation"]["loss"] != pytest.approx(expected["losses"][0], rel=1e-3)
    for engine in ("torch", "torch, 0"):
        run = runs("two ranks")[f"{engine}: {name}"]
        assert run["losses"] == pytest.approx(expected["losses"], rel=1e-6)
        assert run["evaluation"] == pytest.approx(expected["evaluation"], rel=1e-5)
        assert (run["skips"], run["scale"]) == (expected["skips"], expected["scale"])
        assert run["apart"] == 0.0


@pytest.mark.distributed
def test_a_resumed_data_parallel_run_is_bit_equal(runs):
    """From three ranks on, a sum's rounding depends on where DistributedDataParallel puts a gradient."""
    straight, resumed = (runs("three ranks")[name] for name in ("straight", "resumed"))
    assert (resumed["losses"], resumed["norms"]) == (straight["losses"], straight["norms"])
