"""From a config to an engine, and what has to be set up before there is one."""

from __future__ import annotations

import os

import torch

from mae_vit.config import Config
from mae_vit.objectives.base import Task
from mae_vit.plan import Plan
from mae_vit.training.distributed import Ranks
from mae_vit.training.engine import Engine, StepOptions, TorchEngine
from mae_vit.training.optimizers import OptimizerOptions


def be_deterministic() -> None:
    """Makes equal runs on equal devices equal bit for bit, or fail.

    Not `warn_only`: with it flash and memory-efficient attention keep their backward
    passes of varying order, deterministic ones being chosen only without.
    """
    # cuBLAS asks for this.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)


def connect(config: Config, device: torch.device) -> None:
    """Joins the ranks, where the engine needs it."""
    if config.train.engine == "deepspeed":
        # DeepSpeed takes seconds to import: not before the input was checked.
        from mae_vit.training.deepspeed_engine import init_process_group

        init_process_group(device)


def optimizer_options(config: Config) -> OptimizerOptions:
    """Which optimizer, with its own options."""
    optim = config.optim
    return OptimizerOptions(optim.name, optim.weight_decay, optim.own_options)


def build_engine(
    config: Config,
    plan: Plan,
    objective: Task,
    ranks: Ranks,
    device: torch.device,
    *,
    optimizer: OptimizerOptions | None = None,
) -> Engine:
    """Builds the engine that the config asks for, with its optimizer or a given one."""
    options = StepOptions(
        optimizer=optimizer or optimizer_options(config),
        clip_grad=config.optim.clip_grad,
        precision=config.train.precision,
        batch_size_per_device=plan.batch_size_per_device,
        accumulation=plan.accumulation,
        zero_stage=config.train.zero_stage,
        compile=config.train.compile,
        activation_checkpointing=config.train.activation_checkpointing,
        ema_decay=config.train.ema_decay,
    )
    if config.train.engine == "torch":
        return TorchEngine(objective, options, ranks, device)
    from mae_vit.training.deepspeed_engine import DeepSpeedEngine

    return DeepSpeedEngine(objective, options, ranks, device)
