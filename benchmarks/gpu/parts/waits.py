"""How often a step makes the host wait for the device: the run path of `pretrain/run.py` between two log lines.

Implicit waits are those that `torch.cuda.set_sync_debug_mode` knows (a GPU alone has them); explicit
ones are calls of `torch.cuda.synchronize` and of DeepSpeed's.
"""

from __future__ import annotations

import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks.engine import ENGINES
from benchmarks.gpu.jobs import Emit, Job
from benchmarks.gpu.parts.sizes import COMPARED, TINY, Model, with_objective
from benchmarks.harness.runs import lengths, live
from benchmarks.harness.workloads import ROOT, Workload
from mae_vit.config.plan import make_plan
from mae_vit.core.batch import Batch
from mae_vit.objectives import OBJECTIVES
from mae_vit.runtime.ranks import find_ranks
from mae_vit.training.engines.build import build_engine, init_process_group

STEPS = 5
# Steps before, in which allocators, optimizer state and kernels are made.
_WARM_UP = 3
_SYNC_WARNING = "synchronizing CUDA operation"
_STAGES = (0, 1, 2, 3)


def jobs(*, tiny: bool, scratch: Path) -> list[Job]:
    """One process for the torch engine, one for DeepSpeed."""
    model = TINY if tiny else COMPARED
    torch_keys = tuple(f"torch {name}" for name in OBJECTIVES)
    zero_keys = tuple(f"ZeRO {stage}" for stage in _STAGES)
    return [
        Job("torch engine", torch_keys, _OnTorch(model), limit_s=150),
        Job("DeepSpeed", zero_keys, _OnDeepSpeed(model), limit_s=150),
    ]


class _OnTorch:
    """Each objective on the torch engine: nothing may wait."""

    def __init__(self, model: Model) -> None:
        self._model = model

    def __call__(self, wanted: frozenset[str], emit: Emit) -> None:
        for name in OBJECTIVES:
            if f"torch {name}" in wanted:
                workload = self._model.workload(*_length(self._model), *ENGINES["torch"][1])
                waits = count_waits(with_objective(workload, name), "error")
                emit(f"torch {name}", {**waits, "met": not any(waits[key] for key in _COUNTS)})


class _OnDeepSpeed:
    """MAE at each stage of ZeRO: counted."""

    def __init__(self, model: Model) -> None:
        self._model = model

    def __call__(self, wanted: frozenset[str], emit: Emit) -> None:
        for stage in _STAGES:
            if f"ZeRO {stage}" in wanted:
                options = ["train.engine=deepspeed", f"train.zero_stage={stage}"]
                workload = self._model.workload(*_length(self._model), *options)
                emit(f"ZeRO {stage}", count_waits(workload, "warn"))


_COUNTS = ("waits_per_step", "synchronized_per_step")


def _length(model: Model) -> list[str]:
    total = _WARM_UP + STEPS
    never = f"monitor.log_every_steps={total + 1}"
    return [*lengths(turns=1, steps=total, batch_size=model.batch_size), never]


def count_waits(workload: Workload, mode: str) -> dict[str, Any]:
    """Counts the waits of some steps of a run.

    Args:
        workload: whose steps.
        mode: "warn" counts implicit waits; "error" ends the run at the first, and says where it is.

    Returns:
        Waits for each step; `where` the first of them is. `waits_per_step` is None without a GPU.
    """
    ranks, device = find_ranks(), workload.device()
    init_process_group(workload.config, device)
    plan = make_plan(workload.config, num_samples=1000 * workload.batch_size, world_size=1)
    engine = build_engine(workload.config, plan, workload.objective(), ranks, device)
    on_gpu = device.type == "cuda"
    batch_of = workload.batches(torch.device("cpu"), pinned=on_gpu)
    window = _Window(mode, on_gpu)

    def source() -> Iterator[Batch]:
        for step in range(plan.total_steps):
            if step == _WARM_UP:
                window.open()
            if step == _WARM_UP + STEPS:
                window.close()
            yield batch_of(step)

    where = None
    with tempfile.TemporaryDirectory(prefix="mae-vit-benchmark-") as folder:
        try:
            run = Path(folder) / "run"
            classes = workload.num_classes
            live(workload.config, plan, workload.info, engine, source, None, folder=run, num_classes=classes)
        except RuntimeError as error:
            if _SYNC_WARNING not in str(error):
                raise
            where = _place_in_project(error)
        finally:
            window.close()
    waits = (1 if where else window.waits) if on_gpu else None
    counts = {"waits_per_step": waits and waits / STEPS, "synchronized_per_step": window.synchronized / STEPS}
    return {"steps": STEPS, **counts, **({"where": where} if where else {})}


class _Window:
    """Counts waits between `open` and `close`."""

    def __init__(self, mode: str, on_gpu: bool) -> None:
        self._mode, self._on_gpu = mode, on_gpu
        self._stack: ExitStack | None = None
        self._warned: list[warnings.WarningMessage] = []
        self.waits, self.synchronized = 0, 0

    def open(self) -> None:
        self._stack = ExitStack()
        for owner in _synchronizers():
            counted = self._counting(owner.synchronize)
            self._stack.enter_context(mock.patch.object(owner, "synchronize", counted))
        if self._on_gpu:
            self._warned = self._stack.enter_context(warnings.catch_warnings(record=True)) or []
            warnings.simplefilter("always")
            self._stack.callback(torch.cuda.set_sync_debug_mode, "default")
            torch.cuda.set_sync_debug_mode(self._mode)

    def close(self) -> None:
        if self._stack is not None:
            self._stack.close()
            self._stack = None
            self.waits = sum(_SYNC_WARNING in str(warning.message) for warning in self._warned)

    def _counting(self, original: Callable[..., None]) -> Callable[..., None]:
        def synchronize(*arguments: Any, **options: Any) -> None:
            self.synchronized += 1
            original(*arguments, **options)

        return synchronize


def _synchronizers() -> list[Any]:
    """Who offers a call that waits for the device; DeepSpeed's GPU accelerator calls torch's."""
    if torch.cuda.is_available():
        return [torch.cuda]
    from deepspeed.accelerator import get_accelerator

    return [torch.cuda, get_accelerator()]


def _place_in_project(error: BaseException) -> str:
    """The innermost line of this project on the way to an error."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if frame.filename.startswith(str(ROOT / "mae_vit"))]
    frame = (ours or frames)[-1]
    return f"{Path(frame.filename).name}:{frame.lineno} {frame.line}"
