"""Runs a pretraining job: config, data, objective, engine, resume, loop."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

from mae_vit.config.command_line import Arguments
from mae_vit.config.load import load_config
from mae_vit.objectives.pretrain_config import PretrainConfig
from mae_vit.pretraining.plan_text import describe_plan
from mae_vit.pretraining.setup import Setup, initialize, seen_labels, set_up
from mae_vit.runtime.ranks import Ranks, find_ranks
from mae_vit.training.checkpoints.checkpoint import COST_BEFORE, LABELS_SEEN
from mae_vit.training.outputs.run_folder import RunFolder
from mae_vit.training.plan_text import print_notes
from mae_vit.training.run import run
from mae_vit.training.startup import as_array_task, begin, note_of_run_around, open_run_folder


def read_config(arguments: Arguments) -> tuple[PretrainConfig, Ranks]:
    """Reads the config and finds this process's rank; rank 0 prints notes; raises InputError for bad input."""
    assert arguments.config is not None
    notes, given = list[str](), (arguments.config, arguments.overrides)
    config = load_config(PretrainConfig, *given, overrides_from=arguments.overrides_from, notes=notes)
    config, ranks = as_array_task(config), find_ranks()
    if ranks.rank == 0:
        print_notes([*notes, *note_of_run_around(arguments, config)])
    return config, ranks


def pretrain(arguments: Arguments) -> Path:
    """Checks everything, then trains; returns the run folder of the finished run.

    Raises:
        InputError: before anything is written, for every error that the user can fix.
        TrainingFailed: if the run cannot continue.
        RunInterrupted: if it was stopped, after saving.
    """
    config, ranks = read_config(arguments)
    setup = set_up(config, ranks)
    if ranks.rank == 0:
        print_notes(setup.plan.notes)
    with open_run_folder(config) as folder:
        _train(setup, arguments, folder)
    return folder.path


def _train(setup: Setup, arguments: Arguments, folder: RunFolder) -> None:
    say, begun = setup.ranks.rank == 0, begin(setup, arguments, folder)
    if begun is None:
        if say:
            print(f"{folder.shown()} is finished ({setup.plan.total_steps} steps); encoder: {folder.encoder}")
        return
    setup, precision, checkpoint = begun
    config, objective = setup.config, setup.build()
    # Initial weights may have seen labels.
    source, seen, before = setup.source, setup.info.labels, None
    if checkpoint is not None:
        before = checkpoint.identity.get(COST_BEFORE)
        seen = checkpoint.identity.get(LABELS_SEEN, seen)
    elif weights := initialize(objective, config, setup.info, say=say):
        from mae_vit.weights.encoder import cost_of  # slow import that few runs need

        source, before = weights.source, asdict(cost_of(weights))
        seen = seen_labels(config, setup.data, weights.labels)
    setup = replace(setup, info=replace(setup.info, labels=seen, before=before or None), source=source)
    plan_text = describe_plan(setup, folder, checkpoint, precision, timed=False) if say else ""
    run(setup, setup.build_engine(objective), folder, checkpoint, plan_text)
