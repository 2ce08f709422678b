"""Puts a fine-tuning job together: setup, resume, precision, then the training loop or the scores of frozen features.

`_start` has the order. `setup.py` resolves data, network and steps, and `mae_vit/training/trainer.py` takes the
steps; `models/` holds the network and its loss, `results/` the test, `frozen/` the modes that encode each image once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mae_vit.config.command_line import Arguments
from mae_vit.core.batch import Batch
from mae_vit.core.errors import InputError
from mae_vit.data.batches.prefetch import fetch_split
from mae_vit.data.order.order import Skipped
from mae_vit.finetuning.config.schema import FinetuneConfig
from mae_vit.finetuning.frozen.features import open_frozen
from mae_vit.finetuning.frozen.score import describe_scoring, is_scored, say_finished, score
from mae_vit.finetuning.models.build import Trainable, classifier_optimizer_options, draws_noise
from mae_vit.finetuning.plan_text import (
    describe_initial_model,
    describe_outcome,
    describe_plan,
    describe_rates,
    rate_table,
    segmentation_notes,
    write_rates,
)
from mae_vit.finetuning.results.masks import MaskResults
from mae_vit.finetuning.results.predict import Predictor
from mae_vit.finetuning.results.results import ClassResults, Results
from mae_vit.finetuning.setup import Setup, set_up
from mae_vit.objectives.config import PAIRS
from mae_vit.runtime.ranks import find_ranks, run_on_rank_zero
from mae_vit.training.checkpoints.checkpoint import CheckpointInfo
from mae_vit.training.engines.base import Engine
from mae_vit.training.engines.build import build_engine
from mae_vit.training.engines.precision import Chosen, choose_precision
from mae_vit.training.engines.state import BestWeights, weights_of
from mae_vit.training.engines.step_time import time_steps
from mae_vit.training.evals import HeldOut, OnlineProbe
from mae_vit.training.outputs.plan_text import print_notes
from mae_vit.training.outputs.run_folder import RunFolder
from mae_vit.training.run import run
from mae_vit.training.startup import (
    Identity,
    agree_on_precision,
    as_array_task,
    foresee_start,
    is_finished,
    note_of_run_around,
    open_run_folder,
    resume_or_start,
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
        _start(arguments, setup, folder)
    return folder.path


def _start(arguments: Arguments, setup: Setup, folder: RunFolder) -> None:
    config, ranks, device, identity = setup.config, setup.ranks, setup.device, setup.identity
    # 1. A dry run says what would happen.
    if arguments.dry_run:
        (_foresee_training if setup.mode.augment else _foresee_scores)(arguments, setup, folder, identity)
        return
    # 2. Data, ranks, and the checkpoint to resume from.
    if setup.mode.augment:
        fetch_split(setup.data.index, setup.data.source, setup.data.order, say=ranks.local_rank == 0)
    checkpoint = resume_or_start(config, arguments, folder, identity, ranks, device, saves=setup.mode.augment)
    # 3. A finished run is left as it is.
    if not setup.mode.augment:
        finished = run_on_rank_zero(lambda: is_scored(folder, identity), ranks)
    else:
        assert setup.plan is not None
        finished = checkpoint is not None and is_finished(folder, checkpoint, setup.plan, ranks)
    if finished:
        say_finished(setup, folder)
        return
    # 4. One precision for all ranks.
    chosen = agree_on_precision(config.train.precision, device, ranks)
    config, identity, chosen = settle_precision(config, identity, checkpoint, chosen, device)
    if ranks.rank == 0:
        print(f"precision: {chosen}")
    # 5. Steps, or scores.
    if setup.mode.augment:
        _train(setup, config, folder, identity, chosen, checkpoint)
    else:
        score(setup, config, folder, identity, chosen, arguments)


def _train(
    setup: Setup,
    config: FinetuneConfig,
    folder: RunFolder,
    identity: Identity,
    precision: Chosen,
    checkpoint: CheckpointInfo | None,
) -> None:
    """Builds network and engine, and takes the steps from `checkpoint` on."""
    plan, ranks, say = setup.plan, setup.ranks, setup.ranks.rank == 0
    assert plan is not None
    model = setup.build()
    report = setup.load(model) if checkpoint is None else None
    if say:
        setup.warn_of_seen_labels()
        if report is not None:
            print(report.describe(setup.weights_file))
        if checkpoint is None:
            setup.warn_of_normalization()
    if rates := rate_table(config, model, plan):
        if say:
            print(describe_rates(rates))
        run_on_rank_zero(lambda: write_rates(folder, rates), ranks)
    engine = build_engine(
        config, plan, model, ranks, setup.device, optimizer=classifier_optimizer_options(config)
    )
    run_setup = RunSetup(
        config,
        plan,
        engine,
        folder,
        identity,
        setup.costs,
        draws_noise(model),
        setup.mode.metric if len(setup.data.held_out) else None,
        setup.source,
        plan_text=describe_plan(setup, folder, precision, checkpoint) if say else "",
    )
    predictor = Predictor(ranks, engine.device, engine.module.context, plan.batch_size_per_device)
    kind = MaskResults if setup.mode.labels == "mask" else ClassResults
    results = kind(config, setup.data, folder, predictor, setup.info, setup.labels_seen)
    run(run_setup, Job(setup, engine, setup.build(), results), checkpoint)


def _foresee_training(arguments: Arguments, setup: Setup, folder: RunFolder, identity: Identity) -> None:
    """Prints the plan of a run that trains, and loads its weights."""
    config, plan, say = setup.config, setup.plan, setup.ranks.rank == 0
    assert plan is not None
    checkpoint, stop = foresee_start(
        folder, arguments.resume, identity, plan, extend=arguments.extend, warn=say
    )
    chosen = choose_precision(config.train.precision, setup.device)  # a dry run does not join the ranks
    chosen = settle_precision(config, identity, checkpoint, chosen, setup.device)[2]
    model = setup.build()
    report = setup.load(model)
    if not say:
        return
    setup.warn_of_seen_labels()
    pairs = config.finetune.mixup or config.finetune.cutmix
    try_steps = partial(
        time_steps,
        *(config, plan, setup.build, setup.data, setup.ranks, setup.device, chosen.precision),
        unit=PAIRS.unit if pairs else config.data.repeats,
        optimizer=classifier_optimizer_options(config),
    )
    print(describe_plan(setup, folder, chosen, checkpoint, try_steps=try_steps))
    print(describe_initial_model(setup, model, report, stop))


def _foresee_scores(arguments: Arguments, setup: Setup, folder: RunFolder, identity: Identity) -> None:
    """Prints the plan of a run that scores frozen features, or that it is finished."""
    done, stop = False, ""
    try:
        done = arguments.resume != "never" and is_scored(folder, identity)
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


@dataclass(frozen=True)
class Job:
    """The fine-tuning part of a run. `training/run.py` takes its batches, and calls `finish` and `results` at the end.

    Attributes:
        setup: config, data and steps.
        engine: computes the steps.
        test_model: a second network, for the chosen weights.
        outcome: measures these weights and writes the results.
    """

    setup: Setup
    engine: Engine
    test_model: Trainable
    outcome: Results
    _summary: dict[str, Any] = field(default_factory=dict)

    def batches(self, start_step: int, skipped: Skipped) -> Iterator[Batch]:
        """Yields this rank's micro-batches from `start_step` to the end of the run."""
        assert self.setup.plan is not None
        return self.setup.data.batches(self.engine.ranks, self.setup.plan, start_step, skipped)

    def samples_of(self, data_step: int) -> list[dict[str, Any]]:
        """Describes the samples of a step in the data order."""
        return self.setup.data.samples_of(data_step)

    def held_out(self) -> HeldOut | None:
        """Returns the images that choose the epoch."""
        return self.setup.data.held_out_batches(
            self.engine.ranks,
            pictures=self.setup.config.monitor.picture_images,
            batch_size=self.setup.batch_size,
        )

    def probe(self) -> OnlineProbe | None:
        """Returns None: the held-out accuracy replaces a probe."""
        return None

    def views(self) -> None:
        """Returns None: `mae-vit inspect` draws views of the result."""
        return None

    def finish(self, step: int, best: BestWeights | None) -> tuple[dict[str, Any], Callable[[], None]]:
        """Tests the chosen weights, or the last ones if none were chosen; collective."""
        if best is None:
            with self.engine.full_weights():
                best = BestWeights(step, float("nan"), weights_of(self.engine.objective))
        measured, write = self.outcome.measure(self.test_model, best)
        self._summary.update({"labels_seen_by_start": self.setup.label_overlap, **measured})
        return self._summary, write

    def results(self) -> list[str]:
        """Returns lines on the outcome and the files."""
        return self.outcome.lines(self._summary)
