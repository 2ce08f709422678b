"""Whether a run compiles its objective, and why: `train.compile`, once plan and device are known."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sysconfig
from pathlib import Path
from typing import NamedTuple

import torch

from mae_vit.config.plan import Plan
from mae_vit.config.schema import Config, ModelSection
from mae_vit.core.errors import InputError

# From how many micro-batches on `auto` compiles. Compiling takes one or two minutes; of the 1,350 operations of an
# eager micro-batch of ViT-B (tests/unit/training/test_kernel_launches.py) at 5 us each
# a compiled one saves most, 5 to 10 ms: 100 s / 10 ms. An estimate, not measured on a GPU by us.
EARNS_FROM = 10_000
# What Triton writes code for (torch._inductor: `has_triton`).
_OLDEST_GPU = (7, 0)


class Compiling(NamedTuple):
    """What becomes of `train.compile`.

    Attributes:
        on: the objective is compiled.
        why: for people.
        cuda_graphs: its kernels are recorded, and launched as one.
    """

    on: bool
    why: str
    cuda_graphs: bool = False

    def __str__(self) -> str:
        """A line of the plan."""
        graphs = ", its kernels launched as CUDA graphs" if self.cuda_graphs else ""
        return f"{'yes' if self.on else 'no'}{graphs}: {self.why}"


def choose_compiling(config: Config, plan: Plan, device: torch.device) -> Compiling:
    """Decides what `train.compile` comes to.

    Raises:
        InputError: if "reduce-overhead" does not fit the run.
    """
    asked = config.train.compile
    if asked == "auto":
        reason = _why_not(config, plan, device)
        return Compiling(
            reason is None, f"train.compile=auto, {reason or 'on GPUs, for a run that is long enough'}"
        )
    if asked == "reduce-overhead":
        _check_graphs(config, plan, device)
        return Compiling(True, "train.compile=reduce-overhead", cuda_graphs=True)
    return Compiling(asked, f"train.compile={str(asked).lower()}")


def _why_not(config: Config, plan: Plan, device: torch.device) -> str | None:
    """What keeps `auto` from compiling; None for nothing."""
    micro_batches = plan.total_steps * plan.accumulation
    if device.type != "cuda":
        return "off on CPUs"
    if micro_batches < EARNS_FROM:
        return f"{micro_batches:,} micro-batches do not earn the minute or two that it takes (from {EARNS_FROM:,} on)"
    if config.run.deterministic:
        return "off with run.deterministic=true: kernels are chosen by timing them"
    if config.train.zero_stage == 3:
        return "off at ZeRO 3, which gathers weights in between"
    if not isinstance(config.model, ModelSection):
        return (
            f'off for model.name="{config.model.name}": Vision Transformers of ours are known to be one graph'
        )
    return missing_for_triton(device)


def missing_for_triton(device: torch.device) -> str | None:
    """What a machine lacks to compile for its GPU; None for nothing."""
    if torch.cuda.get_device_capability(device) < _OLDEST_GPU:
        return "this GPU is too old for Triton"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    # Triton compiles its launchers, which include Python.h (triton/runtime/build.py).
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return "there is no C compiler"
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        return "Python's headers (Python.h) are not installed"
    return None


def _check_graphs(config: Config, plan: Plan, device: torch.device) -> None:
    if device.type != "cuda":
        raise InputError(
            'train.compile="reduce-overhead" records CUDA graphs, which a CPU has not: use auto or true'
        )
    world_size = plan.effective_batch_size // (plan.accumulation * plan.batch_size_per_device)
    if (engine := config.train.engine_on(world_size)) != "torch":
        raise InputError(
            f'train.compile="reduce-overhead" is the torch engine\'s, train.engine="{engine}" '
            "adds operations of its own between them: use true"
        )
    if world_size > 1:
        raise InputError(
            f'train.compile="reduce-overhead" is for one process, {world_size} reduce gradients between its kernels: '
            "use true"
        )
    if plan.accumulation > 1:
        # Gradients lie in the graph's memory until the step; a second micro-batch would write over them.
        raise InputError(
            f'train.compile="reduce-overhead" takes whole steps, not {plan.accumulation} micro-batches each: give a '
            f"train.batch_size_per_device of {plan.batch_size_per_device * plan.accumulation}, or use true"
        )
