"""Runs the modes that evaluate an encoder's frozen features: few-shot, nearest neighbors, a linear layer."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import ValidationError

from mae_vit.config.command_line import Arguments
from mae_vit.config.load import dump_config, read_run_config
from mae_vit.config.plan import Plan
from mae_vit.core.errors import InputError
from mae_vit.core.files import write_atomically
from mae_vit.core.messages import count_of, error_reason
from mae_vit.evaluation.metrics import Predictions, interval_of_share
from mae_vit.finetuning.config.mode_options import unused_options
from mae_vit.finetuning.config.read import Starts
from mae_vit.finetuning.config.schema import FinetuneConfig
from mae_vit.finetuning.data import FinetuneData
from mae_vit.finetuning.frozen.closed_form import score_in_closed_form
from mae_vit.finetuning.frozen.initial_model import Measured, open_measured, open_untrained_twin
from mae_vit.finetuning.frozen.linear_probe import (
    WEIGHTS,
    describe_probe,
    describe_results,
    plan_probe,
    score_by_probe,
)
from mae_vit.finetuning.label_overlap import labels_after_training
from mae_vit.finetuning.models.build import describe_encoder
from mae_vit.finetuning.models.classifiers import Classifier
from mae_vit.finetuning.plan_text import describe_outcome
from mae_vit.finetuning.results.predict import Predictor
from mae_vit.finetuning.results.write import Outputs, sizes_of
from mae_vit.runtime.collectives import barrier, gather_objects, run_on_rank_zero
from mae_vit.runtime.ranks import Ranks
from mae_vit.runtime.signals import exit_on_signal
from mae_vit.runtime.slurm import mark_slurm_progress
from mae_vit.training.checkpoints.resume import Identity, check_identity, run_identity
from mae_vit.training.engines.cost import estimate
from mae_vit.training.engines.precision import Chosen, autocast, choose_precision
from mae_vit.training.outputs.environment import describe_environment
from mae_vit.training.outputs.plan_text import print_notes
from mae_vit.training.outputs.run_folder import RunFolder
from mae_vit.training.startup import (
    agree_on_precision,
    resume_or_start,
    run_folder_locked,
    settle_precision,
)
from mae_vit.weights.start import origin_of


def score_frozen(
    arguments: Arguments,
    config: FinetuneConfig,
    data: FinetuneData,
    build: Callable[[], Classifier],
    starts: Starts,
    folder: RunFolder,
    ranks: Ranks,
    device: torch.device,
) -> None:
    """Scores frozen features on the test split, which it reads once; then those of random weights, to compare with.

    Raises:
        InputError: if the folder holds another run, or if options do not fit the data.
    """
    mode = config.finetune.mode
    if isinstance(arguments.resume, Path):
        raise InputError(f'--resume PATH has no effect with finetune.mode="{mode}": it takes no steps')
    config = _fitting_shots(config, data, say=ranks.rank == 0) if mode == "few_shot" else config
    plan = _plan_steps(config, data, arguments, say=ranks.rank == 0) if mode == "linear_probe" else None
    derived = {**data.identity, "finetune.start_digest": starts.digest}
    identity = run_identity(config, derived=derived)
    alone = ranks.world_size == 1 or arguments.dry_run  # several ranks ask together, once they are joined
    done, stop = _foresee(folder, identity, arguments) if alone else (False, "")
    if done:
        _say_finished(config, folder, ranks)
        return
    measured = open_measured(config, data, build, starts, say=ranks.rank == 0)
    if arguments.dry_run:
        if ranks.rank == 0:
            chosen = choose_precision(config.train.precision, device)
            print(
                _describe_plan(config, data, build, plan, chosen), describe_outcome(stop, "scored"), sep="\n"
            )
        return
    resume_or_start(config, arguments, folder, identity, ranks, device, saves=False)
    chosen = agree_on_precision(config.train.precision, device, ranks)
    config, _, chosen = settle_precision(config, identity, None, chosen, device)
    facts = {**sizes_of(config, data), "derived": derived, "labels_seen_by_start": measured.labels_seen}
    facts |= {"notes": list(plan.notes)} if plan is not None and plan.notes else {}
    # For the progress of a comparison: networks encode each image once, and the rest takes little.
    encoded = len(data.train) + len(data.held_out) + len(data.test) * config.finetune.test
    networks = 2 if starts.weights or starts.foreign else 1  # with that of random weights
    facts["scoring_flops"] = networks * encoded * _forward_flops(config, build)

    def create() -> None:
        described = _describe_plan(config, data, build, plan, chosen)
        folder.create(dump_config(config), describe_environment(sys.argv, ranks.world_size), described)
        folder.write_summary("running", facts)
        print_notes([] if plan else _unused(config, arguments))

    with run_folder_locked(folder, ranks):
        # Another process may have finished the run while this one waited for the lock.
        if run_on_rank_zero(lambda: _is_done(folder, identity), ranks):
            _say_finished(config, folder, ranks)
            return
        run_on_rank_zero(create, ranks)
        try:
            with exit_on_signal():
                twin = partial(open_untrained_twin, config, data, build, starts)
                lines = _score_and_write(config, data, measured, twin, plan, facts, folder, ranks, device)
        except Exception:
            if ranks.rank == 0:
                with suppress(OSError):
                    folder.write_summary("failed", facts)
            raise
    if ranks.rank == 0:
        mark_slurm_progress()
        print("\n".join(lines))
    barrier(ranks)


def _plan_steps(config: FinetuneConfig, data: FinetuneData, arguments: Arguments, *, say: bool) -> Plan:
    plan = plan_probe(config, data, same_batch=arguments.same_batch)
    if say:
        print_notes(plan.notes)
    return plan


def _say_finished(config: FinetuneConfig, folder: RunFolder, ranks: Ranks) -> None:
    if ranks.rank == 0:
        results = folder.path / "results.json" if config.finetune.test else folder.summary
        print(f"{folder.path} is finished; results: {results}")


def _describe_plan(
    config: FinetuneConfig,
    data: FinetuneData,
    build: Callable[[], Classifier],
    plan: Plan | None,
    precision: Chosen,
) -> str:
    if plan is not None:
        probe = describe_probe(config, data, plan, _forward_flops(config, build))
        return f"{probe}\nprecision   {precision}"
    return (
        f"{config.finetune.mode} of {_named(config)}: {len(data.train):,} labeled "
        f'images, {len(data.test):,} of split "{data.test_index.split}"; {precision}'
    )


def _forward_flops(config: FinetuneConfig, build: Callable[[], Classifier]) -> float:
    image_shape = (config.model.channels, *config.model.image_hw)
    costs = estimate(build, image_shape=image_shape, batch_size_per_device=_batch_size(config))
    return costs.flops_per_image / 3


def _named(config: FinetuneConfig) -> str:
    origin = origin_of(config.finetune.start)
    return (config.finetune.start or "random weights") + (f" ({origin})" if origin else "")


def _score_and_write(
    config: FinetuneConfig,
    data: FinetuneData,
    measured: Measured,
    open_twin: Callable[[], Measured | None],
    plan: Plan | None,
    facts: dict[str, Any],
    folder: RunFolder,
    ranks: Ranks,
    device: torch.device,
) -> list[str]:
    """Scores, writes the results, and returns the lines to print."""
    batch_size = _batch_size(config)
    precision = config.train.precision
    assert precision != "auto", "`settle_precision` comes first"
    predictor = Predictor(ranks, device, partial(autocast, device, precision), batch_size)
    outputs = Outputs(
        config, data, folder, predictor, describe_encoder(config, data), labels_after_training(config, data)
    )
    scores, guesses, weights = _score(config, data, measured, plan, outputs)
    summary = {**facts, "train_top1": None, "val_top1": None, **scores}
    if (top1 := _top1(config, summary)) is not None:
        summary["interval_95"] = interval_of_share(top1, _images_scored(config, data))
        # After the run's own, whose memory is free by then.
        measured.encoder.to("cpu")
        try:
            if (twin := _open_on_all(open_twin, ranks)) is not None:
                summary["random_weights_top1"] = _top1(config, _score(config, data, twin, plan, outputs)[0])
        except Exception as error:  # the scores above are whole
            # Bad input is that on all ranks; of anything else the others do not know, and wait for this rank.
            if ranks.world_size > 1 and not isinstance(error, InputError):
                raise
            note = f"random weights could not be measured to compare with: {error_reason(error)}"
            summary["notes"] = [*summary.get("notes", []), note]
            print_notes([note] if ranks.rank == 0 else [])

    def write() -> None:
        try:
            if weights is not None:
                write_atomically(folder.path / WEIGHTS, weights)
            if guesses is not None:
                outputs.write(guesses, summary, {})
            folder.write_summary("done", summary)
        except OSError as error:
            raise InputError(
                f"results cannot be written to {folder.path}: {error_reason(error)}; make room, then give the same "
                "command again"
            ) from None

    run_on_rank_zero(write, ranks)
    return _results(config, data, summary, outputs)


def _open_on_all(open_twin: Callable[[], Measured | None], ranks: Ranks) -> Measured | None:
    """Opens the network of random weights; collective.

    Raises:
        InputError: on all ranks, if any cannot.
    """
    twin, why = None, None
    try:
        twin = open_twin()
    except Exception as error:  # of a network of others, whatever it is
        why = error_reason(error)
    if whys := [*filter(None, gather_objects(why, ranks))]:
        raise InputError(whys[0])
    return twin


def _score(
    config: FinetuneConfig, data: FinetuneData, measured: Measured, plan: Plan | None, outputs: Outputs
) -> tuple[dict[str, Any], Predictions | None, bytes | None]:
    """Scores an encoder's features: entries of the summary, predictions, and the content of `WEIGHTS`; collective."""
    measured.encoder.place(outputs.predictor.device)
    if plan is not None:
        return score_by_probe(config, data, measured, plan, outputs)
    scores, guesses = score_in_closed_form(config, data, measured.encoder, outputs.predictor)
    return scores | {"test_most_frequent": guesses.most_frequent}, guesses, None


def _top1(config: FinetuneConfig, scores: dict[str, Any]) -> float | None:
    """The accuracy that the run is about: of the test split, or of held-out images if it does not read that."""
    top1: float | None = scores["test_top1" if config.finetune.test else "val_top1"]
    return top1


def _images_scored(config: FinetuneConfig, data: FinetuneData) -> int:
    return len(data.test if config.finetune.test else data.held_out)


def _batch_size(config: FinetuneConfig) -> int:
    return config.train.batch_size_per_device or min(256, config.train.effective_batch_size)


def _results(
    config: FinetuneConfig, data: FinetuneData, summary: dict[str, Any], outputs: Outputs
) -> list[str]:
    """Returns the lines to print about results and files."""
    path, mode = outputs.folder.path, str(config.finetune.mode)
    if origin := origin_of(config.finetune.start):
        mode += f", {origin}"
    images = _images_scored(config, data)
    if config.finetune.test:
        lines = [
            f"done: test {summary['test_top1']:.2%} of {images:,} images ({mode}; always the most "
            f"frequent class: {summary['test_most_frequent']:.2%})"
        ]
    else:
        lines = [
            f"done: held-out {summary['val_top1']:.2%} of {images:,} images ({mode}); the test split "
            "was not read (finetune.test=false)"
        ]
    lines += _compared(summary, images)
    if config.finetune.mode == "linear_probe":
        lines += describe_results(summary, outputs)
    lines.append(
        f"  features  rank {summary['rankme']:.1f} of {summary['num_features']} (RankMe), "
        f"standard deviation {summary['feature_std']:.3f}, of the training images"
    )
    for shots, few_shot in summary.get("few_shot", {}).items():
        spread = (
            "" if few_shot["std"] is None else f" +- {few_shot['std']:.2%} over {config.finetune.draws} draws"
        )
        lines.append(f"  {shots:>3} shots  {few_shot['mean']:.2%}{spread}")
    if config.finetune.test:
        lines.append(f"  details   {path / 'results.json'}, {path / 'predictions.csv'}")
    return lines


def _compared(summary: dict[str, Any], images: int) -> list[str]:
    """Returns the line that says how sure the accuracy is, and what random weights reach."""
    if "interval_95" not in summary:
        return []
    low, high = summary["interval_95"]
    line = f"  95 %      {low:.1%} to {high:.1%}, with other {images:,} images"
    reference = summary.get("random_weights_top1")
    if reference is not None:
        way = "more" if low > reference else "less" if high < reference else "no clear difference"
        line += f"; the same network with random weights has {reference:.2%}: {way}"
    return [line]


def _unused(config: FinetuneConfig, arguments: Arguments) -> list[str]:
    """Returns a note that names options without effect in a mode without training; empty if there are none."""
    mode, typed = config.finetune.mode, {override.partition("=")[0] for override in arguments.overrides}
    unused = unused_options(config, mode)
    asked = [option for option in unused if option.partition("=")[0] in typed]
    of_file = [option for option in unused if option not in asked] if arguments.config else []
    if not asked and not of_file:
        return []
    groups = [", ".join(asked)] if asked else []
    if of_file:
        groups.append(f"of {arguments.config} {', '.join(of_file)}")
    return [f"{mode} trains nothing, so these have no effect: {'; '.join(groups)}"]


def _fitting_shots(config: FinetuneConfig, data: FinetuneData, *, say: bool) -> FinetuneConfig:
    """Drops default shots for which a class has too few labels. If the config sets such shots, raises InputError."""
    counts = np.bincount(np.asarray(data.index.labels)[data.train], minlength=len(data.classes))
    fewest = int(counts[counts > 0].min())
    if max(config.finetune.shots) <= fewest:
        return config
    name = data.classes[int(np.flatnonzero(counts == fewest)[0])]
    fitting = [shots for shots in config.finetune.shots if shots <= fewest] or [fewest]
    has = f'class "{name}" has {count_of(fewest, "labeled image")}'
    if "shots" in config.finetune.model_fields_set:
        raise InputError(f"finetune.shots={config.finetune.shots}: {has}: give finetune.shots={fitting}")
    if say:
        print(f"note: {has}: finetune.shots={fitting}, not the default {config.finetune.shots}")
    return config.model_copy(update={"finetune": config.finetune.model_copy(update={"shots": fitting})})


def _foresee(folder: RunFolder, identity: Identity, arguments: Arguments) -> tuple[bool, str]:
    """Returns whether the run is finished; and why it would stop in its folder, which only a dry run survives."""
    try:
        return arguments.resume != "never" and _is_done(folder, identity), ""
    except InputError as error:
        if not arguments.dry_run:
            raise
        return False, str(error)


def _is_done(folder: RunFolder, identity: Identity) -> bool:
    """Returns whether the folder holds this run, finished. If it holds another one, raises InputError."""
    if folder.read_status() is None or not (folder.path / "config.yaml").exists():
        return False
    derived = json.loads(folder.summary.read_text()).get("derived", {})
    try:
        begun = FinetuneConfig.model_validate(read_run_config(folder.path))
    except ValidationError:
        raise InputError(
            f"{folder.path} holds a run of another command: give this one another run.name, or --resume "
            "never to move that aside"
        ) from None
    check_identity(run_identity(begun, derived=derived).values, identity, folder.path)
    return folder.read_status() == "done"
