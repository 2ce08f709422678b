"""Writes the plan of a fine-tuning run, which `--dry-run` prints."""

from __future__ import annotations

from typing import Any

from mae_vit.core.messages import count_of
from mae_vit.data.data_path import describe_place
from mae_vit.finetuning.config.schema import FinetuneConfig
from mae_vit.finetuning.data import FinetuneData
from mae_vit.finetuning.training import Training
from mae_vit.training.checkpoints.checkpoint import CheckpointInfo
from mae_vit.training.engines.precision import Chosen
from mae_vit.training.outputs.run_folder import RunFolder
from mae_vit.training.plan_text import describe_augment, describe_training, plan_lines, times
from mae_vit.training.startup import describe_start


def describe_plan(
    setup: Training, folder: RunFolder, precision: Chosen, checkpoint: CheckpointInfo | None, time: str = ""
) -> str:
    """Returns the resolved plan of a run that resumes from `checkpoint`, one fact per line, also its `time`."""
    config, plan, data, costs = setup.config, setup.plan, setup.data, setup.costs
    height, width = config.model.image_hw
    begin = describe_start(folder, checkpoint, plan, setup.source)
    chosen = (
        f"{len(data.held_out):,} images of the same split choose the best weights, "
        f"{times(plan.evaluate_every_steps, plan)}"
        if len(data.held_out)
        else "none: the last weights are tested"
    )
    place = describe_place(config.data.path, data.index.folder)
    facts = {
        "run": f"{folder.shown()}, {begin}, seed {config.run.seed}",
        "model": f"{config.model.name}, {height}x{width} px, {costs.parameters:,} parameters",
        "compute": costs.describe_compute(plan.total_steps * plan.effective_batch_size),
        "data": f'{place}, split "{config.data.split}": {count_of(len(data.train), "image")} of '
        f"{len(data.classes)} classes",
        "cores": data.describe_cores(setup.ranks),
        "validation": chosen,
        "tested on": describe_test(config, data),
        "views": describe_augment(config, data.place),
        "recipe": describe_recipe(setup),
        **describe_training(setup, folder.path, precision, time),
    }
    return plan_lines(facts, plan.notes, data.core_warnings())


def describe_outcome(stop: str, done: str) -> str:
    """Returns the last lines of a dry run: why the run itself will `stop`, if so, and what was not `done`."""
    if not stop:
        return f"all checks passed; nothing was {done}"
    return f"warning: a run would stop: {stop}\nall other checks passed; nothing was {done}"


def describe_test(config: FinetuneConfig, data: FinetuneData) -> str:
    """Returns a phrase that names the images of the final test."""
    if not config.finetune.test:
        return "nothing (finetune.test=false)"
    return f'split "{data.test_index.split}", {len(data.test):,} images, once, at the end'


def describe_recipe(setup: Training) -> str:
    """Lists the parts of the recipe that are switched on."""
    config, finetune = setup.config, setup.config.finetune
    parts = {
        "label smoothing": finetune.label_smoothing,
        "mixup": finetune.mixup,
        "cutmix": finetune.cutmix,
        "drop-path": config.model.drops.get("drop_path_rate", 0.0),
        "average of the weights": config.train.ema_decay,
        "clipped at norm": config.optim.clip_grad,
        "layer decay": config.optim.layer_decay,
    }
    texts = [f"{name} {value:g}" for name, value in parts.items() if value]
    if config.mode.labels == "mask":
        texts.append("linear head on the frozen encoder" if config.mode.trains == "head" else "light head")
    elif setup.info is not None:
        pooled = "[CLS]" if finetune.pool == "cls" else "mean of the patches"
        texts.append(f"{pooled}, head {finetune.head_init}")
    return ", ".join(texts) or "no extras"


def segmentation_notes(config: FinetuneConfig) -> list[str]:
    """Returns a note on options without effect on masks."""
    if config.mode.labels != "mask":
        return []
    unused: list[tuple[str, str, Any]] = [("finetune", "pool", "mean"), ("finetune", "head_init", "zero")]
    if config.mode.trains == "head":
        unused += [
            ("optim", "layer_decay", None),
            ("model", "drop_rate", 0.0),
            ("model", "drop_path_rate", 0.0),
        ]
    named = [
        f"{section}.{key}={value}"
        for section, key, neutral in unused
        if (value := getattr(getattr(config, section), key, neutral)) != neutral
    ]
    return [f"{', '.join(named)}: no effect with finetune.mode={config.finetune.mode}"] if named else []
