"""Evaluates an encoder's frozen features: few-shot, nearest neighbors, a linear layer."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import suppress
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
from mae_vit.evaluation.metrics import Predictions
from mae_vit.finetuning.config.mode_options import unused_options
from mae_vit.finetuning.config.schema import FinetuneConfig
from mae_vit.finetuning.data import FinetuneData
from mae_vit.finetuning.frozen.closed_form import score_in_closed_form
from mae_vit.finetuning.frozen.linear_probe import (
    WEIGHTS,
    describe_probe,
    describe_results,
    plan_probe,
    score_by_probe,
)
from mae_vit.finetuning.label_overlap import labels_after_training, start_label_overlap, warn_of_seen_labels
from mae_vit.finetuning.models.build import describe_encoder
from mae_vit.finetuning.models.classifiers import Classifier, ViTClassifier
from mae_vit.finetuning.results.predict import Predictor
from mae_vit.finetuning.results.write import Outputs, sizes_of
from mae_vit.runtime.collectives import barrier, run_on_rank_zero
from mae_vit.runtime.ranks import Ranks
from mae_vit.runtime.signals import exit_on_signal
from mae_vit.runtime.slurm import mark_slurm_progress
from mae_vit.training.checkpoints.resume import Identity, check_identity, run_identity
from mae_vit.training.engines.cost import estimate
from mae_vit.training.engines.precision import Autocast
from mae_vit.training.outputs.environment import describe_environment
from mae_vit.training.outputs.plan_text import print_notes
from mae_vit.training.outputs.run_folder import RunFolder
from mae_vit.training.startup import resume_or_start, run_folder_locked
from mae_vit.weights.load import LoadReport, load_weights, warn_normalization_differs
from mae_vit.weights.start import Weights


def score_frozen(
    arguments: Arguments,
    config: FinetuneConfig,
    data: FinetuneData,
    build: Callable[[], Classifier],
    start: Weights | None,
    folder: RunFolder,
    ranks: Ranks,
    device: torch.device,
) -> None:
    """Scores frozen features on the test split, which is read once.

    Raises:
        InputError: if the folder holds another run, or settings do not fit the data.
    """
    mode = config.finetune.mode
    if isinstance(arguments.resume, Path):
        raise InputError(
            f'--resume PATH has no effect with finetune.mode="{mode}": there are no steps to resume from'
        )
    if mode == "few_shot":
        config = _fitting_shots(config, data, say=ranks.rank == 0)
    plan = plan_probe(config, data) if mode == "linear_probe" else None
    if plan is not None and ranks.rank == 0:
        print_notes(plan.notes)
    derived = {**data.identity, "finetune.start_digest": start.digest if start else None}
    identity = run_identity(config, derived=derived)
    results = folder.path / "results.json" if config.finetune.test else folder.summary
    # Several ranks ask together, once they are joined.
    alone = ranks.world_size == 1 or arguments.dry_run
    if alone and arguments.resume != "never" and _is_done(folder, identity):
        if ranks.rank == 0:
            print(f"{folder.path} is finished; results: {results}")
        return
    model = build()
    assert isinstance(model, ViTClassifier)
    coverage = load_frozen(model, start)
    if coverage is not None and start is not None and ranks.rank == 0:
        print(coverage.describe(start.source))
        warn_normalization_differs(start, data.mean, data.std)
        if "fc_norm.weight" in start.tensors and model.pool == "cls":
            print(
                "note: the start was fine-tuned on the mean of the patch tokens: finetune.pool=mean reads that"
            )
    seen = start_label_overlap(start, None, config, data)
    if seen == "held-out" and start is not None and ranks.rank == 0:
        warn_of_seen_labels(start.source)
    if start is None and ranks.rank == 0:
        print("note: no start (--ckpt): these are the features of random weights")
    if arguments.dry_run:
        if ranks.rank == 0:
            if plan is not None:
                image_shape = (config.model.in_chans, *config.model.image_hw)
                forward = estimate(build, image_shape=image_shape, batch_size_per_device=_batch_size(config))
                print(describe_probe(config, data, plan, forward.flops_per_image / 3))
            else:
                print(
                    f"{mode} of {config.finetune.start or 'random weights'}: {len(data.train):,} labeled images, "
                    f'{len(data.test):,} of split "{data.test_index.split}"'
                )
            print("all checks passed; nothing was scored")
        return
    resume_or_start(config, arguments, folder, identity, ranks, device, saves=False)
    told = {**sizes_of(config, data), "derived": derived, "labels_seen_by_start": seen}
    text = dump_config(config)

    def create() -> None:
        folder.create(text, describe_environment(sys.argv, ranks.world_size))
        folder.write_summary("running", told)
        if plan is None and (note := _note_unused(config, arguments)):
            print(note)

    with run_folder_locked(folder, ranks):
        # Meanwhile another process may have ended it; asked for anew, it was moved aside.
        if run_on_rank_zero(lambda: _is_done(folder, identity), ranks):
            if ranks.rank == 0:
                print(f"{folder.path} is finished; results: {results}")
            return
        run_on_rank_zero(create, ranks)
        try:
            with exit_on_signal():
                lines = _score_and_write(config, data, model, plan, told, folder, ranks, device)
        except Exception:
            if ranks.rank == 0:
                with suppress(OSError):
                    folder.write_summary("failed", told)
            raise
    if ranks.rank == 0:
        mark_slurm_progress()
        print("\n".join(lines))
    barrier(ranks)


def _score_and_write(
    config: FinetuneConfig,
    data: FinetuneData,
    model: ViTClassifier,
    plan: Plan | None,
    told: dict[str, Any],
    folder: RunFolder,
    ranks: Ranks,
    device: torch.device,
) -> list[str]:
    """Scores, writes the results and prints them."""
    batch_size = _batch_size(config)
    predictor = Predictor(ranks, device, Autocast(model, device, config.train.precision).context, batch_size)
    outputs = Outputs(
        config, data, folder, predictor, describe_encoder(config, data), labels_after_training(config, data)
    )
    model.to(device)
    guesses: Predictions | None
    if plan is not None:
        found, guesses, weights = score_by_probe(config, data, model, plan, outputs)
    else:
        found, guesses = score_in_closed_form(config, data, model, predictor)
        found["test_most_frequent"] = guesses.most_frequent
        weights = None
    summary = {**told, "train_top1": None, "val_top1": None, **found}

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


def load_frozen(model: ViTClassifier, start: Weights | None) -> LoadReport | None:
    """Puts a start into the encoder, with the norm in front of the features that is its own.

    Behind the last block that is the final norm, whatever is read; a start that was fine-tuned on
    the mean of the patch tokens has `fc_norm` behind the mean instead (official MAE code).

    Returns:
        How each tensor was loaded; None without pretrained weights.

    Raises:
        InputError: if it does not fit, naming the difference.
    """
    norm = torch.nn.LayerNorm(model.encoder.embed_dim, eps=1e-6)
    model.encoder.norm, model.fc_norm = norm, torch.nn.Identity()
    if start is None:
        return None
    own = [name for name in ("fc_norm.weight", "fc_norm.bias") if name in start.tensors]
    if own:
        model.encoder.norm, model.fc_norm = model.fc_norm, norm
    coverage = load_weights(start, model.encoder)
    if own:
        if len(own) == 1:
            raise InputError(f"{start.source} has half of its norm behind the mean: {own[0]} alone")
        norm.load_state_dict({name.removeprefix("fc_norm."): start.tensors[name] for name in own})
        coverage.skipped = [name for name in coverage.skipped if name not in own]
        coverage.loaded += own
    return coverage


def _batch_size(config: FinetuneConfig) -> int:
    return config.train.batch_size_per_device or min(256, config.train.effective_batch_size)


def _results(
    config: FinetuneConfig, data: FinetuneData, summary: dict[str, Any], outputs: Outputs
) -> list[str]:
    """Returns lines about the result and the files."""
    path, mode = outputs.folder.path, config.finetune.mode
    if config.finetune.test:
        lines = [
            f"done: test {summary['test_top1']:.2%} of {len(data.test):,} images ({mode}; always the most "
            f"frequent class: {summary['test_most_frequent']:.2%})"
        ]
    else:
        lines = [
            f"done: held-out {summary['val_top1']:.2%} of {len(data.held_out):,} images ({mode}); the test split "
            "was not read (finetune.test=false)"
        ]
    if mode == "linear_probe":
        lines += describe_results(summary, outputs)
    for shots, told in summary.get("few_shot", {}).items():
        spread = "" if told["std"] is None else f" +- {told['std']:.2%} over {config.finetune.draws} draws"
        lines.append(f"  {shots:>3} shots  {told['mean']:.2%}{spread}")
    if config.finetune.test:
        lines.append(f"  details   {path / 'results.json'}, {path / 'predictions.csv'}")
    return lines


def _note_unused(config: FinetuneConfig, arguments: Arguments) -> str:
    """Returns a line about options of command line and config that have no effect in a mode without training."""
    mode, typed = config.finetune.mode, {override.partition("=")[0] for override in arguments.overrides}
    unused = unused_options(config, mode)
    asked = [option for option in unused if option.partition("=")[0] in typed]
    of_file = [option for option in unused if option not in asked] if arguments.config else []
    if not asked and not of_file:
        return ""
    told = [", ".join(asked)] if asked else []
    if of_file:
        told.append(f"of {arguments.config} {', '.join(of_file)}")
    return f"note: {mode} trains nothing, so that these have no effect: {'; '.join(told)}"


def _fitting_shots(config: FinetuneConfig, data: FinetuneData, *, say: bool) -> FinetuneConfig:
    """Leaves out shots that a class has too few labeled images for; those that were asked for are refused."""
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


def _is_done(folder: RunFolder, identity: Identity) -> bool:
    """Whether this very run, of these weights and data, is finished; another run in the folder is refused."""
    if folder.read_status() is None or not (folder.path / "config.yaml").exists():
        return False
    derived = json.loads(folder.summary.read_text()).get("derived", {})
    try:
        begun = FinetuneConfig.model_validate(read_run_config(folder.path))
    except ValidationError:
        raise InputError(
            f"{folder.path} holds a run that is none of fine-tuning: give this one another run.name, or --resume "
            "never to move that aside"
        ) from None
    check_identity(run_identity(begun, derived=derived).values, identity, folder.path)
    return folder.read_status() == "done"
