"""Puts a fine-tuning job together: config, data, pretrained weights, network, engine, resume, loop, test.

`_finetune` has all this in order. `setup.py` chooses its parts, and `mae_vit/training/trainer.py` takes the steps;
`models/` holds the network and its loss, `results/` the test. The modes of `FROZEN` (linear_probe, few_shot, knn)
leave it early, for `frozen/score.py`; segment_probe, which trains its layer by the same loop, stays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from mae_vit.config.batch import check_same_batch
from mae_vit.config.command_line import Arguments
from mae_vit.config.plan import Plan, check_grouping, make_plan
from mae_vit.core.batch import Batch
from mae_vit.core.errors import InputError
from mae_vit.data.batches.prefetch import fetch_split
from mae_vit.data.order.order import Skipped
from mae_vit.finetuning.config.read import Starts, read_config
from mae_vit.finetuning.config.schema import FROZEN, SEGMENTATION, FinetuneConfig
from mae_vit.finetuning.data import FinetuneData, fit_to_data, open_data
from mae_vit.finetuning.frozen.score import score_frozen
from mae_vit.finetuning.label_overlap import labels_after_training, start_label_overlap, warn_of_seen_labels
from mae_vit.finetuning.models.build import (
    build_classifier,
    classifier_optimizer_options,
    describe_encoder,
    draws_noise,
    teacher_from_config,
)
from mae_vit.finetuning.plan_text import (
    describe_initial_model,
    describe_plan,
    describe_rates,
    rates_of,
    write_rates,
)
from mae_vit.finetuning.results.predict import Predictor
from mae_vit.finetuning.segmentation.build import segmentation_notes
from mae_vit.finetuning.segmentation.results import describe_scores
from mae_vit.finetuning.setup import choose_parts, estimate_costs, identify
from mae_vit.objectives.config import PAIRS
from mae_vit.objectives.objective import Task
from mae_vit.runtime.collectives import run_on_rank_zero
from mae_vit.runtime.ranks import Ranks, find_ranks
from mae_vit.training.engines.base import Engine
from mae_vit.training.engines.build import build_engine
from mae_vit.training.engines.precision import choose_precision
from mae_vit.training.engines.state import BestWeights, weights_of
from mae_vit.training.engines.step_time import time_steps
from mae_vit.training.evals import HeldOut, OnlineProbe
from mae_vit.training.outputs.plan_text import describe_training, print_notes
from mae_vit.training.outputs.run_folder import RunFolder
from mae_vit.training.run import run
from mae_vit.training.run_setup import RunSetup
from mae_vit.training.startup import (
    agree_on_precision,
    choose_device,
    foresee_start,
    is_finished,
    open_run_folder,
    resume_or_start,
    settle_precision,
)
from mae_vit.weights.load import warn_normalization_differs


def finetune(arguments: Arguments) -> Path:
    """Checks everything, then trains and tests, or with `dry_run` prints the plan; returns the run folder.

    Raises:
        InputError: before anything is written, for every error that the user can fix.
        TrainingFailed: if the run cannot continue.
        RunInterrupted: if it was stopped, after saving.
    """
    config, starts, notes = read_config(arguments)
    ranks = find_ranks()
    if ranks.rank == 0:
        print_notes(notes)
    with open_run_folder(config) as folder:
        _finetune(arguments, config, starts, folder, ranks)
    return folder.path


def _finetune(
    arguments: Arguments, config: FinetuneConfig, starts: Starts, folder: RunFolder, ranks: Ranks
) -> None:
    device, start = choose_device(config, ranks), starts.weights
    config = fit_to_data(config, start, say=ranks.rank == 0)
    data = open_data(config, ranks, device, interpolation=starts.interpolation, dry_run=arguments.dry_run)
    info = describe_encoder(config, data)
    teacher = teacher_from_config(config, data, device)
    if config.finetune.mode in FROZEN:
        if arguments.extend:
            raise InputError(f'--extend has no effect with finetune.mode="{config.finetune.mode}"')
        classifier = partial(build_classifier, config, data, info, teacher)
        score_frozen(arguments, config, data, classifier, starts, folder, ranks, device)
        return
    build, load, make_outputs, metric = choose_parts(config, data, info, teacher, starts)
    plan = _plan_steps(config, data, ranks, same_batch=arguments.same_batch)
    if ranks.rank == 0:
        print_notes([*plan.notes, *segmentation_notes(config, starts.foreign)])
        if starts.foreign is not None:
            warn_normalization_differs(starts.foreign, data.mean, data.std)
    costs = estimate_costs(config, plan, build, data)
    labels_seen = labels_after_training(config, data, start, teacher)
    identity = identify(config, plan, data, starts, teacher, labels_seen)
    overlap = start_label_overlap(start, teacher, config, data)
    if overlap == "held-out" and ranks.rank == 0:
        warn_of_seen_labels(" or ".join(filter(None, (config.finetune.start, config.finetune.teacher))))
    describe = partial(describe_plan, config, plan, ranks, data, costs, folder)
    training = partial(describe_training, config, plan, costs, ranks, device, folder.path)
    if arguments.dry_run:
        checkpoint, stop = foresee_start(
            folder, arguments.resume, identity, plan, extend=arguments.extend, warn=ranks.rank == 0
        )
        chosen = choose_precision(config.train.precision, device)  # the ranks are not joined
        chosen = settle_precision(config, identity, checkpoint, chosen, device)[2]
        model = build()
        coverage = load(model, start) if start else None
        if ranks.rank == 0:
            pairs = config.finetune.mixup or config.finetune.cutmix
            try_steps = partial(
                time_steps,
                *(config, plan, build, data, ranks, device, chosen.precision),
                unit=PAIRS.unit if pairs else config.data.repeats,
                optimizer=classifier_optimizer_options(config),
            )
            print(describe(training(chosen, try_steps=try_steps), checkpoint))
            print(describe_initial_model(config, plan, model, coverage, stop))
        return
    fetch_split(data.index, data.source, data.order, say=ranks.local_rank == 0)
    checkpoint = resume_or_start(config, arguments, folder, identity, ranks, device)
    if checkpoint is not None and is_finished(folder, checkpoint, plan, ranks):
        if ranks.rank == 0:
            results = folder.path / "results.json" if config.finetune.test else folder.summary
            print(f"{folder.path} is finished ({checkpoint.step} steps); results: {results}")
        return
    chosen = agree_on_precision(config.train.precision, device, ranks)
    config, identity, chosen = settle_precision(config, identity, checkpoint, chosen, device)
    if ranks.rank == 0:
        print(f"precision: {chosen}")
    model = build()
    if checkpoint is None and start is not None:
        coverage = load(model, start)
        if ranks.rank == 0:
            print(coverage.describe(start.source))
            warn_normalization_differs(start, data.mean, data.std, data.bands)
    rates = rates_of(config, model, plan)
    if rates:
        if ranks.rank == 0:
            print(describe_rates(rates))
        run_on_rank_zero(lambda: write_rates(folder, rates), ranks)
    engine = build_engine(config, plan, model, ranks, device, optimizer=classifier_optimizer_options(config))
    setup = RunSetup(
        config,
        plan,
        engine,
        folder,
        identity,
        costs,
        draws_noise(model),
        metric if len(data.held_out) else None,
        config.finetune.start or "scratch",
        plan_text=describe(training(chosen), checkpoint) if ranks.rank == 0 else "",
    )
    facts = {"labels_seen_by_start": overlap}
    outputs = partial(make_outputs, config, data, folder, info=info, labels=labels_seen)
    run(setup, Job(config, plan, data, engine, folder, build(), outputs, facts), checkpoint)


def _plan_steps(config: FinetuneConfig, data: FinetuneData, ranks: Ranks, *, same_batch: bool) -> Plan:
    sizes = {"num_samples": len(data.train), "world_size": ranks.world_size}
    if same_batch:
        check_same_batch(config, **sizes)
    plan = make_plan(config, **sizes)
    if config.finetune.mixup or config.finetune.cutmix:
        check_grouping(plan, ranks.world_size, config.data.repeats, **PAIRS._asdict())
    return plan


@dataclass(frozen=True)
class Job:
    """The fine-tuning part of a run.

    Attributes:
        config: of the run.
        plan: the config's derived values.
        data: labeled images: trained on, held out, tested.
        engine: computes the steps.
        folder: receives all output.
        test_model: a second network, for the chosen weights.
        outputs: makes what measures and writes, from a predictor.
        facts: entries of the summary beside measurements.
    """

    config: FinetuneConfig
    plan: Plan
    data: FinetuneData
    engine: Engine
    folder: RunFolder
    test_model: Task
    outputs: Callable[..., Any]
    facts: dict[str, Any]
    _summary: dict[str, Any] = field(default_factory=dict)

    def batches(self, start_step: int, skipped: Skipped) -> Iterator[Batch]:
        """Yields this rank's micro-batches from `start_step` to the end of the run."""
        return self.data.batches(self.engine.ranks, self.plan, start_step, skipped)

    def samples_of(self, data_step: int) -> list[dict[str, Any]]:
        """Names the samples of a step of the data order."""
        return self.data.samples_of(data_step)

    def held_out(self) -> HeldOut | None:
        """The images that choose the epoch."""
        return self.data.held_out_batches(
            self.engine.ranks,
            pictures=self.config.monitor.picture_images,
            batch_size=self.plan.batch_size_per_device,
        )

    def probe(self) -> OnlineProbe | None:
        """Returns None: the held-out accuracy replaces a probe."""
        return None

    def views(self) -> None:
        """Returns None: `mae-vit inspect` draws views of the result."""
        return None

    def finish(self, step: int, best: BestWeights | None) -> tuple[dict[str, Any], Callable[[], None]]:
        """Tests the chosen weights, the last ones where none were chosen; collective."""
        if best is None:
            with self.engine.full_weights():
                best = BestWeights(step, float("nan"), weights_of(self.engine.objective))
        predictor = Predictor(
            self.engine.ranks,
            self.engine.device,
            self.engine.module.context,
            self.plan.batch_size_per_device,
        )
        measured, write = self.outputs(predictor=predictor).measure(self.test_model, best)
        self._summary.update({**self.facts, **measured})
        return self._summary, write

    def results(self) -> list[str]:
        """Names the outcome and the files."""
        summary, path = self._summary, self.folder.path
        if self.config.finetune.mode in SEGMENTATION:
            return describe_scores(self.config, summary, path)
        model = f"  model     {path / 'model.safetensors'}"
        if not self.config.finetune.test:
            return [
                f"  held-out  {summary['val_top1']:.2%} of {summary['val_size']:,} images at step "
                f"{summary['best_step']}; the test split was not read (finetune.test=false)",
                model,
            ]
        return [
            f"  test      {summary['test_top1']:.2%} of {summary['test_size']:,} images, with the weights of step "
            f"{summary['best_step']} (the most frequent class: {summary['test_most_frequent']:.2%})",
            f"  reading   {summary['reading']}",
            model,
            f"  details   {path / 'results.json'}, {path / 'predictions.csv'}",
        ]
