"""Decides from `train.compile`, plan and device whether a run compiles its objective, and says why."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sysconfig
from pathlib import Path
from typing import NamedTuple

import torch

from mae_vit.config.plan import Plan
from mae_vit.config.schema import Config

# `auto` compiles from this number of micro-batches on: 100 s / 10 ms. Compiling takes one or two minutes, and saves
# 20 ms per micro-batch (ViT-B, 256 images, H200: docs/performance.md); we assume half of that for other networks.
EARNS_FROM = 10_000
# The oldest compute capability that Triton supports (torch._inductor: `has_triton`).
_OLDEST_GPU = (7, 0)


class Compiling(NamedTuple):
    """The decision about `train.compile`.

    Attributes:
        on: the objective is compiled.
        why: the reason, shown in the plan.
    """

    on: bool
    why: str

    def __str__(self) -> str:
        """Returns a line for the plan."""
        return f"{'yes' if self.on else 'no'}: {self.why}"


def choose_compiling(config: Config, plan: Plan, device: torch.device) -> Compiling:
    """Decides whether to compile."""
    asked = config.train.compile
    if asked == "auto":
        reason = _why_not(config, plan, device)
        return Compiling(
            reason is None, f"train.compile=auto, {reason or 'on GPUs, for a run that is long enough'}"
        )
    return Compiling(asked, f"train.compile={str(asked).lower()}")


def _why_not(config: Config, plan: Plan, device: torch.device) -> str | None:
    """Returns why `auto` does not compile; None if it does."""
    micro_batches = plan.total_steps * plan.accumulation
    if device.type != "cuda":
        return "off on CPUs"
    if micro_batches < EARNS_FROM:
        return f"{micro_batches:,} micro-batches do not earn the minute or two that it takes (from {EARNS_FROM:,} on)"
    if config.run.deterministic:
        return "off with run.deterministic=true: kernels are chosen by timing them"
    if config.train.zero_stage == 3:
        return "off at ZeRO 3, which gathers weights in between"
    if not config.model.one_graph:
        return (
            f'off for model.name="{config.model.name}": Vision Transformers of ours are known to be one graph'
        )
    return missing_for_triton(device)


def missing_for_triton(device: torch.device) -> str | None:
    """Returns what this machine lacks to compile for its GPU; None if nothing is missing."""
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
