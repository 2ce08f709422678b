"""How often a step makes the host wait for the device: the run path of `pretrain/run.py` between two log lines.

Implicit waits are those that `torch.cuda.set_sync_debug_mode` knows (a GPU alone has them); explicit
ones are calls of `torch.cuda.synchronize` and of DeepSpeed's.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks.gpu.figures import Group
from benchmarks.gpu.parts.sizes import COMPARED, TINY, Model, with_objective
from benchmarks.harness.workloads import Workload, lengths, live
from mae_vit.config.plan import make_plan
from mae_vit.core.batch import Batch
from mae_vit.objectives import OBJECTIVES
from mae_vit.runtime.ranks import find_ranks
from mae_vit.training.engines.build import build_engine, init_process_group

STEPS = 5
# Steps before, in which allocators, optimizer state and kernels are made.
_WARM_UP = 3
_SYNC_WARNING = "synchronizing CUDA operation"


def groups(*, tiny: bool, scratch: Path) -> list[Group]:
    """One process for the torch engine, one for DeepSpeed."""
    model = TINY if tiny else COMPARED
    return [
        {f"torch {name}": partial(on_torch, model, name) for name in OBJECTIVES},
        {f"ZeRO {stage}": partial(on_deepspeed, model, stage) for stage in range(4)},
    ]


def on_torch(model: Model, name: str) -> dict[str, Any]:
    """An objective on the torch engine: nothing may wait."""
    workload = model.workload(*_length(model), "train.engine=torch", "train.zero_stage=0")
    waits = count_waits(with_objective(workload, name))
    return {**waits, "met": not (waits["waits_per_step"] or waits["synchronized_per_step"])}


def on_deepspeed(model: Model, stage: int) -> dict[str, Any]:
    """MAE at a stage of ZeRO: counted."""
    options = ("train.engine=deepspeed", f"train.zero_stage={stage}")
    return count_waits(model.workload(*_length(model), *options))


def _length(model: Model) -> list[str]:
    total = _WARM_UP + STEPS
    never = f"monitor.log_every_steps={total + 1}"
    return [*lengths(turns=1, steps=total, batch_size=model.batch_size), never]


def count_waits(workload: Workload) -> dict[str, Any]:
    """Waits for each of some steps of a run, and `where` the first is; `waits_per_step` is None without a GPU."""
    ranks, device = find_ranks(), workload.device()
    init_process_group(workload.config, device)
    plan = make_plan(workload.config, num_samples=1000 * workload.batch_size, world_size=1)
    engine = build_engine(workload.config, plan, workload.objective(), ranks, device)
    on_gpu = device.type == "cuda"
    batch_of = workload.batches(torch.device("cpu"), pinned=on_gpu)
    explicit: list[mock.Mock] = []
    warned: list[warnings.WarningMessage] = []

    def source() -> Iterator[Batch]:
        yield from map(batch_of, range(_WARM_UP))
        with ExitStack() as window, warnings.catch_warnings(record=True) as caught:
            for owner in _synchronizers():
                counted = mock.patch.object(owner, "synchronize", wraps=owner.synchronize)
                explicit.append(window.enter_context(counted))
            if on_gpu:
                warnings.simplefilter("always")
                window.callback(torch.cuda.set_sync_debug_mode, "default")
                torch.cuda.set_sync_debug_mode("warn")
            # The loop asks for the batch after the last of these when that one's step is taken.
            yield from map(batch_of, range(_WARM_UP, _WARM_UP + STEPS))
        warned.extend(each for each in caught if _SYNC_WARNING in str(each.message))
        yield batch_of(_WARM_UP + STEPS)

    with tempfile.TemporaryDirectory(prefix="mae-vit-benchmark-") as folder:
        live(workload, plan, engine, source, None, folder=Path(folder) / "run")
    return {
        "steps": STEPS,
        "waits_per_step": len(warned) / STEPS if on_gpu else None,
        "synchronized_per_step": sum(each.call_count for each in explicit) / STEPS,
        **({"where": f"{Path(warned[0].filename).name}:{warned[0].lineno}"} if warned else {}),
    }


def _synchronizers() -> list[Any]:
    """Who offers a call that waits for the device; DeepSpeed's GPU accelerator calls torch's."""
    if torch.cuda.is_available():
        return [torch.cuda]
    from deepspeed.accelerator import get_accelerator

    return [torch.cuda, get_accelerator()]
