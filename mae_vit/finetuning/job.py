"""Puts a fine-tuning job together: setup, resume, precision, then the training loop or the scores of frozen features.

`setup.py` resolves data, network and steps, and `mae_vit/training/trainer.py` takes the steps; `models/` holds the
network and its loss, `results.py` the test, `frozen/` the modes that encode each image once.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mae_vit.config.command_line import Arguments
from mae_vit.core.errors import InputError
from mae_vit.finetuning.config.schema import FinetuneConfig
from mae_vit.finetuning.frozen.features import open_frozen
from mae_vit.finetuning.frozen.score import describe_scoring, is_scored, say_finished, score
from mae_vit.finetuning.models.build import classifier_optimizer_options, draws_noise
from mae_vit.finetuning.plan_text import (
    describe_initial_model,
    describe_outcome,
    describe_plan,
    describe_rates,
    rate_table,
    segmentation_notes,
)
from mae_vit.finetuning.setup import Setup, set_up
from mae_vit.runtime.ranks import find_ranks
from mae_vit.training.engines.build import build_engine
from mae_vit.training.engines.precision import choose_precision
from mae_vit.training.outputs.run_folder import RunFolder
from mae_vit.training.plan_text import describe_time, print_notes
from mae_vit.training.run import run
from mae_vit.training.startup import (
    as_array_task,
    begin,
    foresee_start,
    note_of_run_around,
    open_run_folder,
    settle_precision,
)
from mae_vit.training.trainer import RunSetup

if TYPE_CHECKING:
    from mae_vit.finetuning.config.pretrained import Pretrained


def run_job(
    arguments: Arguments, config: FinetuneConfig, pretrained: Pretrained | None, notes: list[str]
) -> Path:
    """Runs a job whose config is checked, after printing `notes` about it; returns the run folder."""
    config, ranks = as_array_task(config), find_ranks()
    if ranks.rank == 0:
        print_notes([*notes, *note_of_run_around(arguments, config)])
    with open_run_folder(config) as folder:
        setup = set_up(arguments, config, pretrained, ranks)
        if ranks.rank == 0:
            print_notes([*(setup.plan.notes if setup.plan else ()), *segmentation_notes(config)])
        if arguments.dry_run:
            (_foresee_training if setup.mode.augment else _foresee_scores)(setup, arguments, folder)
        else:
            (_train if setup.mode.augment else score)(setup, arguments, folder)
    return folder.path


def _train(setup: Setup, arguments: Arguments, folder: RunFolder) -> None:
    """Builds network and engine, and takes the steps that are left."""
    begun = begin(setup, arguments, folder)
    if begun is None:
        say_finished(setup, folder)
        return
    setup, precision, checkpoint = begun
    config, plan, say = setup.config, setup.plan, setup.ranks.rank == 0
    assert plan is not None
    model = setup.build()
    report = setup.load(model) if checkpoint is None else None
    if say:
        setup.warn_of_seen_labels()
        if report is not None:
            print(report.describe(setup.weights_file))
        if checkpoint is None:
            setup.warn_of_normalization()
    if say and (rates := rate_table(config, model, plan)):
        print(describe_rates(rates))
    optimizer = classifier_optimizer_options(config)
    run_setup = RunSetup(
        config,
        plan,
        build_engine(config, plan, model, setup.ranks, setup.device, costs=setup.costs, optimizer=optimizer),
        folder,
        setup.identity,
        setup.costs,
        noisy=draws_noise(model),
        selects=setup.mode.metric if len(setup.data.held_out) else None,
        begins_from=setup.source,
        plan_text=describe_plan(setup, folder, precision, checkpoint) if say else "",
    )
    run(run_setup, setup, checkpoint)


def _foresee_training(setup: Setup, arguments: Arguments, folder: RunFolder) -> None:
    """Prints the plan of a run that trains, and loads its weights."""
    config, plan = setup.config, setup.plan
    assert plan is not None
    checkpoint, stop = foresee_start(setup, arguments, folder)
    chosen = choose_precision(config.train.precision, setup.device)  # a dry run does not join the ranks
    chosen = settle_precision(setup, checkpoint, chosen)[1]
    model = setup.build()
    report = setup.load(model)
    if setup.ranks.rank > 0:
        return
    setup.warn_of_seen_labels()
    time = describe_time(plan, setup.ranks, setup.time_steps(chosen.precision))
    print(describe_plan(setup, folder, chosen, checkpoint, time))
    print(describe_initial_model(setup, model, report, stop))


def _foresee_scores(setup: Setup, arguments: Arguments, folder: RunFolder) -> None:
    """Prints the plan of a run that scores frozen features, or that it is finished."""
    done, stop = False, ""
    try:
        done = arguments.resume != "never" and is_scored(folder, setup.identity)
    except InputError as error:
        stop = str(error)
    if done:
        say_finished(setup, folder)
    elif setup.ranks.rank == 0:
        open_frozen(setup, say=True)
        setup.warn_of_normalization()
        setup.warn_of_seen_labels()
        chosen = choose_precision(setup.config.train.precision, setup.device)
        print(describe_scoring(setup, chosen), describe_outcome(stop, "scored"), sep="\n")
