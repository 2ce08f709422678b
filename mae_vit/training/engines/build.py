"""Builds an engine from a config."""

from __future__ import annotations

import os

import torch

from mae_vit.config.plan import Plan
from mae_vit.config.schema import Config
from mae_vit.objectives.objective import Task
from mae_vit.runtime.process_group import give_up_after, join
from mae_vit.runtime.ranks import ALONE, Ranks
from mae_vit.training.engines.base import Engine, StepOptions
from mae_vit.training.engines.compiling import choose_compiling
from mae_vit.training.engines.cost import Estimate
from mae_vit.training.engines.torch_engine import TorchEngine
from mae_vit.training.optim import OptimizerOptions


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
    if ranks.world_size > 1 or config.train.engine_on(ALONE) == "deepspeed":
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
    costs: Estimate | None = None,
    optimizer: OptimizerOptions | None = None,
) -> Engine:
    """Builds the config's engine; `optimizer` replaces the config's. Without `costs`, "auto" does not compile."""
    compiling = choose_compiling(config, plan, device, costs)
    precision = config.train.precision
    assert precision != "auto", "`settle_precision` comes first"
    options = StepOptions(
        optimizer=optimizer or optimizer_options(config),
        clip_grad=config.optim.clip_grad,
        precision=precision,
        batch_size_per_device=plan.batch_size_per_device,
        accumulation=plan.accumulation,
        zero_stage=config.train.zero_stage,
        compile=compiling.on,
        cuda_graphs=compiling.cuda_graphs,
        attention=config.train.attention,
        activation_checkpointing=config.train.activation_checkpointing,
        ema_decay=config.train.ema_decay,
    )
    if config.train.engine_on(ranks) == "torch":
        return TorchEngine(objective, options, ranks, device)
    if device.type == "cpu":  # DeepSpeed would take a GPU that run.device=cpu leaves alone
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    # DeepSpeed takes seconds to import: check the input first.
    from mae_vit.training.engines.deepspeed_engine import DeepSpeedEngine

    return DeepSpeedEngine(objective, options, ranks, device)
