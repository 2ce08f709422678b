"""Puts a fine-tuning job together: setup, resume, precision, then the training loop or the scores of frozen features.

`setup.py` holds what all modes share, `training.py` what the trainer asks of those that train a network, `models/` that
network and its loss, `results.py` the test, which `training.run` begins after the last step, `frozen/` the modes that
encode each image once.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from mae_vit.config.command_line import Arguments
from mae_vit.config.plan import Plan, check_grouping, fit_batch, make_plan
from mae_vit.core.errors import InputError, RemoteError
from mae_vit.core.messages import count_of
from mae_vit.finetuning.config.schema import FinetuneConfig
from mae_vit.finetuning.data import FinetuneData, fit_to_data, open_data
from mae_vit.finetuning.frozen.features import open_frozen
from mae_vit.finetuning.frozen.score import describe_scoring, is_scored, note_unused, say_finished, score
from mae_vit.finetuning.models.build import describe_encoder
from mae_vit.finetuning.plan_text import describe_outcome, describe_plan, segmentation_notes
from mae_vit.finetuning.setup import Setup
from mae_vit.finetuning.training import Training
from mae_vit.models.encoders.base import LoadReport
from mae_vit.objectives.config import PAIRS
from mae_vit.objectives.objective import Task
from mae_vit.runtime.ranks import Ranks, find_ranks
from mae_vit.training.engines.precision import choose_precision
from mae_vit.training.optim import layer_scales
from mae_vit.training.outputs.run_folder import RunFolder
from mae_vit.training.plan_text import describe_time, print_notes
from mae_vit.training.run import run
from mae_vit.training.startup import (
    as_array_task,
    begin,
    choose_device,
    foresee_start,
    note_of_run_around,
    open_run_folder,
    settle_precision,
)
from mae_vit.training.step_time import time_steps
from mae_vit.weights.read import Weights


def run_job(
    arguments: Arguments, config: FinetuneConfig, pretrained: Weights | None, notes: list[str]
) -> Path:
    """Runs a job whose config is checked, after printing `notes` about it; returns the run folder."""
    config, ranks = as_array_task(config), find_ranks()
    if ranks.rank == 0:
        print_notes([*notes, *note_of_run_around(arguments, config)])
    with open_run_folder(config) as folder:
        setup = set_up(arguments, config, pretrained, ranks)
        if ranks.rank == 0:
            print_notes([*setup.notes, *segmentation_notes(config)])
        if isinstance(setup, Training):
            (_foresee_training if arguments.dry_run else _train)(setup, arguments, folder)
        else:
            (_foresee_scores if arguments.dry_run else score)(setup, arguments, folder)
    return folder.path


def set_up(arguments: Arguments, config: FinetuneConfig, pretrained: Weights | None, ranks: Ranks) -> Setup:
    """Opens the data and resolves everything; returns `Training` for a mode that trains a network.

    Raises:
        InputError: for options that do not fit each other, the weights or the data.
    """
    if not config.mode.augment and (arguments.extend or isinstance(arguments.resume, Path)):
        raise InputError(
            f'--extend and --resume PATH have no effect with finetune.mode="{config.finetune.mode}", which does not '
            "train; leave them out"
        )
    say, device = ranks.rank == 0, choose_device(config, ranks)
    config = fit_to_data(config, pretrained, say=say)
    measured = pretrained.network if pretrained and config.mode.trains != "all" else None
    data = open_data(
        config,
        ranks,
        device,
        interpolation=measured.images.interpolation if measured else "bicubic",
        dry_run=arguments.dry_run,
    )
    info = describe_encoder(config, data, pretrained)
    if config.finetune.mode == "few_shot":
        config = _fit_shots(config, data, say=say)
    plan = None
    if config.mode.trains != "nothing":
        plan = _plan_steps(config, data, ranks, same_batch=arguments.same_batch)
    kind: type[Setup] = Training if config.mode.augment else Setup
    return kind(
        config=config, ranks=ranks, device=device, data=data, pretrained=pretrained, info=info, plan=plan
    )


def _plan_steps(config: FinetuneConfig, data: FinetuneData, ranks: Ranks, *, same_batch: bool) -> Plan:
    """Derives the numbers of the training steps; a linear probe's are for rate factor 1."""
    mode, finetune = config.mode, config.finetune
    # Every rank trains the whole layer on frozen features.
    sizes = {"num_samples": len(data.train), "world_size": ranks.world_size if mode.augment else 1}
    if same_batch:
        fit_batch(config, **sizes, shrinks=False)  # raises if it would shrink
    plan = make_plan(config, **sizes)
    if finetune.mixup or finetune.cutmix:
        check_grouping(plan, ranks.world_size, config.data.repeats, **PAIRS._asdict())
    if not mode.augment:
        lowest = min(finetune.lr_factors) * plan.lr
        if config.optim.min_lr > lowest:
            raise InputError(
                f"optim.min_lr={config.optim.min_lr:g} is above the lowest peak rate {lowest:g} of "
                "finetune.lr_factors; lower it"
            )
        if plan.effective_batch_size < 2:
            raise InputError("the norm of a linear probe needs batches of 2 images or more, not of 1")
        if config.optim.name == "lars" and plan.effective_batch_size < config.train.effective_batch_size:
            advice = "optim.name=lars is for large batches; better add optim.name=sgd train.effective_batch_size=256"
            plan = replace(plan, notes=(*plan.notes, advice))
    return plan


def _fit_shots(config: FinetuneConfig, data: FinetuneData, *, say: bool) -> FinetuneConfig:
    """Drops default shots for which a class has too few labels. If the config sets such shots, raises InputError."""
    counts = np.bincount(np.asarray(data.index.labels)[data.train], minlength=len(data.classes))
    fewest = int(counts[counts > 0].min())
    if max(config.finetune.shots) <= fewest or config.finetune.shots == [config.data.labels_per_class]:
        return config  # the latter are all of the subset, whose classes may have fewer in any mode
    name = data.classes[int(np.flatnonzero(counts == fewest)[0])]
    fitting = [shots for shots in config.finetune.shots if shots <= fewest] or [fewest]
    has = f'class "{name}" has only {count_of(fewest, "labeled image")}'
    if "shots" in config.finetune.model_fields_set:
        raise InputError(f"finetune.shots={config.finetune.shots}: {has}; use finetune.shots={fitting}")
    if say:
        print(f"note: {has}; using finetune.shots={fitting} instead of the default {config.finetune.shots}")
    return config.model_copy(update={"finetune": config.finetune.model_copy(update={"shots": fitting})})


def _train(setup: Training, arguments: Arguments, folder: RunFolder) -> None:
    """Builds network and engine, and takes the steps that are left."""
    begun = begin(setup, arguments, folder)
    if begun is None:
        say_finished(setup, folder)
        return
    setup, precision, checkpoint = begun
    model, say = setup.build(), setup.ranks.rank == 0
    report = setup.load(model) if checkpoint is None else None
    if say:
        setup.warn_of_seen_labels()
        _say_loaded(setup, model, report)
        if checkpoint is None:
            setup.warn_of_normalization()
    plan_text = describe_plan(setup, folder, precision, checkpoint) if say else ""
    run(setup, setup.build_engine(model), folder, checkpoint, plan_text)


def _say_loaded(setup: Training, model: Task, loaded: LoadReport | None) -> None:
    """Prints how the weights fit the network, and the learning rates of its layers."""
    if loaded is not None and setup.pretrained is not None:
        print(loaded.describe(setup.pretrained.source))
    if (decay := setup.config.optim.layer_decay) is not None and setup.config.mode.trains == "all":
        lowest, peak = min(layer_scales(model, decay).values()) * setup.plan.lr, setup.plan.lr
        print(
            f"lr       {lowest:.3e} in the first layer, {1 / decay:.4g} times as much in each next one, to {peak:.3e}"
        )


def _foresee_training(setup: Training, arguments: Arguments, folder: RunFolder) -> None:
    """Prints the plan of a run that trains, and loads its weights."""
    config, plan = setup.config, setup.plan
    checkpoint, stop = foresee_start(setup, arguments, folder)
    chosen = choose_precision(config.train.precision, setup.device)  # a dry run does not join the ranks
    chosen = settle_precision(setup, checkpoint, chosen)[1]
    model = setup.build()
    report = setup.load(model)
    if setup.ranks.rank > 0:
        return
    setup.warn_of_seen_labels()
    tried, done = time_steps(setup, chosen.precision), checkpoint.step if checkpoint else 0
    time = describe_time(plan, setup.ranks, tried, done=done)
    print(describe_plan(setup, folder, chosen, checkpoint, time))
    _say_loaded(setup, model, report)
    print(describe_outcome(stop, "trained"))


def _foresee_scores(setup: Setup, arguments: Arguments, folder: RunFolder) -> None:
    """Prints the plan of a run that scores frozen features, or that it is finished."""
    done, stop = False, ""
    try:
        folder.foresee()
        done = arguments.resume != "never" and is_scored(folder, setup)
    except (RemoteError, InputError) as error:
        stop = str(error)
    if done:
        say_finished(setup, folder)
    elif setup.ranks.rank == 0:
        open_frozen(setup, say=True)
        setup.warn_of_normalization()
        setup.warn_of_seen_labels()
        note_unused(setup.config, arguments)
        chosen = choose_precision(setup.config.train.precision, setup.device)
        print(describe_scoring(setup, chosen), describe_outcome(stop, "scored"), sep="\n")
