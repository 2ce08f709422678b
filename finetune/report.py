"""The plan of a fine-tuning run, for people: what `--dry-run` prints."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from finetune.classifiers import Classifier
from finetune.config import FinetuneConfig
from finetune.data import FinetuneData
from mae_vit.config import ModelSection
from mae_vit.coverage import Coverage
from mae_vit.errors import counted
from mae_vit.plan import Plan, describe_views
from mae_vit.training.checkpoint import Checkpoint
from mae_vit.training.distributed import Ranks
from mae_vit.training.estimate import Estimate
from mae_vit.training.param_groups import LayerRate, layer_rates
from mae_vit.training.run_folder import RunFolder
from mae_vit.urls import shown


def describe_plan(
    config: FinetuneConfig,
    plan: Plan,
    ranks: Ranks,
    device: torch.device,
    data: FinetuneData,
    costs: Estimate,
    folder: RunFolder,
    found: Checkpoint | None,
    coverage: Coverage | None,
    model: Classifier,
) -> str:
    """Returns the resolved plan, a line for each fact, with what is loaded and what each layer learns at."""
    train, finetune, optim = config.train, config.finetune, config.optim
    height, width = config.model.image_hw
    memory = costs.memory_gib(world_size=ranks.world_size, zero_stage=train.zero_stage)
    begin = (
        f"goes on from {found.path} (step {found.step})" if found else f"from {finetune.start or 'scratch'}"
    )
    chosen = (
        f"{len(data.held_out):,} images of the same split, every {plan.evaluate_every_steps:,} steps"
        if len(data.held_out)
        else "none: the last weights are tested"
    )
    facts = {
        "run": f"{folder.path}, {begin}, seed {config.run.seed}",
        "model": f"{config.model.name}, {height}x{width} px, {costs.parameters:,} parameters",
        "compute": costs.describe_compute(plan.total_steps * plan.effective_batch_size),
        "data": f'{shown(config.data.path)}, split "{config.data.split}": {len(data.train):,} images of '
        f"{len(data.classes)} classes, {data.workers} workers for each of {ranks.world_size} ranks",
        "chosen by": chosen,
        "tested on": f'split "{data.test_index.split}", {len(data.test):,} images, once, at the end',
        "views": describe_views(config),
        "recipe": describe_recipe(config),
        "batch": f"{plan.effective_batch_size:,} = {counted(ranks.world_size, 'rank')} x "
        f"{counted(plan.accumulation, 'micro-batch', 'micro-batches')} x {plan.batch_size_per_device}",
        "length": f"{plan.total_steps:,} steps = {plan.total_steps / plan.steps_per_epoch:.2f} epochs of "
        f"{plan.steps_per_epoch:,}",
        "rate": f"{plan.lr:.3e} peak after {plan.warmup_steps:,} steps of warm-up, {optim.schedule} to "
        f"{optim.min_lr:g}; {optim.name}",
        "engine": f"{train.engine}, ZeRO {train.zero_stage}, {train.precision}, {device}",
        "memory": f"{memory:.2f} GiB for each rank, about (states and float32 activations)",
    }
    lines = [f"{name:<12}{text}" for name, text in facts.items()]
    if coverage is not None:
        lines.append(coverage.describe(finetune.start or ""))
    if rates := rates_of(config, model, plan):
        lines.append(describe_rates(rates))
    return "\n".join([*lines, "all checks passed; nothing was trained"])


def describe_recipe(config: FinetuneConfig) -> str:
    """Names the parts of the recipe that are on."""
    finetune, model = config.finetune, config.model
    parts = {
        "label smoothing": finetune.label_smoothing,
        "mixup": finetune.mixup,
        "cutmix": finetune.cutmix,
        "drop-path": model.drop_path_rate,
        "average of the weights": config.train.ema_decay,
        "clipped at norm": config.optim.clip_grad,
        "layer decay": config.optim.layer_decay,
    }
    found = [f"{name} {value:g}" for name, value in parts.items() if value]
    if isinstance(model, ModelSection):
        found.append(
            f"{'[CLS]' if finetune.pool == 'cls' else 'mean of the patches'}, head {finetune.head_init}"
        )
    if finetune.freeze_patch_embed:
        found.append("patch projection frozen")
    if finetune.teacher:
        found.append(f"{finetune.distillation} distillation from {finetune.teacher}")
    return ", ".join(found) or "no extras"


def rates_of(config: FinetuneConfig, model: Classifier, plan: Plan) -> list[LayerRate]:
    """Lists what each layer learns at; empty without layer-wise decay."""
    decay = config.optim.layer_decay
    return [] if decay is None else layer_rates(model, decay, plan.lr)


def describe_rates(rates: Sequence[LayerRate]) -> str:
    """A table for people."""
    lines = ["rates    layer            share       peak  parameters"]
    lines += [
        f"         {row.layer:<14} {row.lr_scale:>7.4f} {row.lr:>10.3e} {row.parameters:>11,}"
        for row in rates
    ]
    return "\n".join(lines)
