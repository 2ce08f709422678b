"""Builds an engine from a config, and decides whether to compile."""

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
from mae_vit.objectives.objective import Task
from mae_vit.runtime.process_group import give_up_after, join
from mae_vit.runtime.ranks import ALONE, Ranks
from mae_vit.training.engines.base import Engine, StepOptions
from mae_vit.training.engines.torch_engine import TorchEngine
from mae_vit.training.optim import OptimizerOptions

# `auto` compiles from this number of micro-batches on: 100 s / 10 ms. Compiling takes one or two minutes, and saves
# 20 ms per micro-batch (ViT-B, 256 images, H200: docs/performance.md); we assume half of that for other networks.
EARNS_FROM = 10_000
# The oldest compute capability that Triton supports (torch._inductor: `has_triton`).
_OLDEST_GPU = (7, 0)


class Compiling(NamedTuple):
    """The decision about `train.compile`."""

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
        return f"{micro_batches:,} micro-batches do not pay for the minute or two (from {EARNS_FROM:,} on)"
    if config.run.deterministic:
        return "off with run.deterministic=true, as kernels are chosen by timing"
    if config.train.zero_stage == 3:
        return "off at ZeRO 3, which gathers weights in between"
    if not config.model.one_graph:
        return (
            f'off for model.name="{config.model.name}", since only our Vision Transformers are known to compile to '
            "one graph"
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


def enable_determinism() -> None:
    """Makes two runs of the same config on the same kind of device equal bit for bit.

    Operations without a deterministic version raise an error. Without the error (`warn_only`), flash and
    memory-efficient attention would keep a backward pass whose order varies.
    """
    # cuBLAS is deterministic only with this setting.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)


def init_process_group(config: Config, device: torch.device, ranks: Ranks = ALONE) -> None:
    """Creates the process group if there are several ranks. DeepSpeed needs a group even for one process."""
    if ranks.world_size > 1 or config.train.engine_on(ranks.world_size) == "deepspeed":
        join(ranks, device, timeout=give_up_after(config.run.hang_timeout_s))


def optimizer_options(config: Config) -> OptimizerOptions:
    """Returns the config's optimizer with its options."""
    optim = config.optim
    return OptimizerOptions(optim.name, **optim.options_of("name"))


def build_engine(
    config: Config,
    plan: Plan,
    objective: Task,
    ranks: Ranks,
    device: torch.device,
    *,
    optimizer: OptimizerOptions | None = None,
) -> Engine:
    """Builds the config's engine; `optimizer` replaces the config's optimizer."""
    precision = config.train.precision
    assert precision != "auto", "`settle_precision` comes first"
    options = StepOptions(
        optimizer=optimizer or optimizer_options(config),
        clip_grad=config.optim.clip_grad,
        precision=precision,
        batch_size_per_device=plan.batch_size_per_device,
        accumulation=plan.accumulation,
        zero_stage=config.train.zero_stage,
        compile=choose_compiling(config, plan, device).on,
        activation_checkpointing=config.train.activation_checkpointing,
        ema_decay=config.train.ema_decay,
    )
    if config.train.engine_on(ranks.world_size) == "torch":
        return TorchEngine(objective, options, ranks, device)
    if device.type == "cpu":  # DeepSpeed would take a GPU that run.device=cpu leaves alone
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    # DeepSpeed takes seconds to import: check the input first.
    from mae_vit.training.engines.deepspeed_engine import DeepSpeedEngine

    return DeepSpeedEngine(objective, options, ranks, device)
