"""Decides whether and how a run compiles its objective."""

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
from mae_vit.core.messages import format_duration
from mae_vit.runtime.ranks import ALONE
from mae_vit.training.engines.cost import Estimate, peak_flops

# Seconds of the first compiled steps, with nothing kept: 53 to 95 on an H100, 101 on an H200 (docs/results/gpu).
_COMPILE_S = 100.0
# Share of the 16-bit peak in a compiled step, of encoders with as many parameters: B/16, then Ti/4 on an H100.
_SHARES = ((50e6, 0.28), (0, 0.11))
# Time of the kernels of a step that is not compiled, over that of a compiled one (B/16 on an H200).
_EAGER = 1.4
# Seconds of the host for each operation of the forward pass, in a whole step: contrastive_mae of 6 + 2 blocks (33 ms);
# between 79 us (that of Ti/4 compiled, on an H200's machine) and the 25 us that steps of B/16 leave room for; Ti/4 with
# 256 images as CUDA graphs (5.1 ms, of which kernels 2.9).
_EAGER_S, _COMPILED_S, _GRAPHS_S = 96e-6, 50e-6, 5e-6
# The peak in FLOP/s that we assume for GPUs without an entry in `cost`, and in fp32: about that of an RTX 4090.
_UNKNOWN_PEAK = 165e12
# The oldest compute capability that Triton supports (torch._inductor: `has_triton`).
_OLDEST_GPU = (7, 0)


class Compiling(NamedTuple):
    """The decision about `train.compile`, and its reason for the plan."""

    on: bool
    why: str
    cuda_graphs: bool = False

    def __str__(self) -> str:
        return f"{'yes' if self.on else 'no'}{', as CUDA graphs' if self.cuda_graphs else ''}: {self.why}"


class StepSeconds(NamedTuple):
    """Predicted seconds of a micro-batch on a GPU, by the way its kernels are made and launched."""

    eager: float
    compiled: float
    graphs: float


def predict_seconds(costs: Estimate, batch_size: int, peak: float) -> StepSeconds:
    """Predicts the seconds of a micro-batch in 16 bits: the GPU computes while the host launches.

    `peak` is in FLOP/s. Constants are measured on an H100 and an H200 with 16 cores (docs/results/gpu).
    """
    share = next(share for least, share in _SHARES if costs.encoder_parameters >= least)
    kernels = batch_size * costs.flops_per_image / (share * peak)
    return StepSeconds(
        max(_EAGER * kernels, costs.launches * _EAGER_S),
        max(kernels, costs.launches * _COMPILED_S),
        # A graph begins when the one before it has ended.
        kernels + costs.launches * _GRAPHS_S,
    )


def choose_compiling(config: Config, plan: Plan, device: torch.device, costs: Estimate | None) -> Compiling:
    """Decides whether to compile; "auto" does if the whole run then takes less time.

    It counts all steps of the run, not those that are left, and the time to compile with nothing kept: compiled losses
    differ by rounding, and a run that resumes must take the way that it began.
    """
    asked = config.train.compile
    if asked != "auto":
        return Compiling(asked, f"train.compile={str(asked).lower()}")
    reason = _why_not(config, plan, device) if costs else "the costs of a step are unknown"
    if reason or costs is None:
        return Compiling(False, f"train.compile=auto, {reason}")
    peak = peak_flops(device, config.train.precision) or _UNKNOWN_PEAK
    seconds = predict_seconds(costs, plan.batch_size_per_device, peak)
    refused = _why_no_graphs(config, plan) if seconds.graphs < seconds.compiled else None
    graphs = seconds.graphs < seconds.compiled and not refused
    faster = seconds.graphs if graphs else seconds.compiled
    saved = plan.total_steps * plan.accumulation * (seconds.eager - faster)
    why = (
        f"train.compile=auto, a micro-batch takes about {1e3 * faster:.1f} ms in place of {1e3 * seconds.eager:.1f}, "
        f"which saves {format_duration(saved)}; compiling takes {format_duration(_COMPILE_S)}"
    )
    on = saved > _COMPILE_S
    return Compiling(on, f"{why}; no CUDA graphs: {refused}" if on and refused else why, on and graphs)


def _why_not(config: Config, plan: Plan, device: torch.device) -> str | None:
    """Returns why "auto" does not compile, whatever the time; None if it may."""
    if device.type != "cuda":
        return "off on CPUs, as compiled losses differ by rounding"
    if config.run.deterministic:
        return "off with run.deterministic=true, as kernels are chosen by timing"
    if config.train.zero_stage == 3:
        return "off at ZeRO 3, which gathers weights in between"
    if config.train.zero_stage and _world_size(plan) > 1:
        # DDP alone cuts the graph where a part of the gradients is complete.
        return f"off at ZeRO {config.train.zero_stage}, whose gradients would wait for the end of the backward pass"
    if not config.model.one_graph:
        return f'off for model.name="{config.model.name}", which is not known to compile to one graph'
    return missing_for_triton(device)


def _why_no_graphs(config: Config, plan: Plan) -> str | None:
    """Returns why a run cannot launch its kernels as CUDA graphs; None if it can."""
    if _world_size(plan) > 1:
        return f"{_world_size(plan)} ranks reduce gradients between kernels"
    if config.train.engine_on(ALONE) == "deepspeed":
        return "DeepSpeed launches kernels of its own in between"
    if plan.accumulation > 1:
        # Gradients lie in the graph's memory, which the next micro-batch overwrites.
        return f"gradients of {plan.accumulation} micro-batches add up"
    return None


def _world_size(plan: Plan) -> int:
    return plan.effective_batch_size // (plan.accumulation * plan.batch_size_per_device)


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
