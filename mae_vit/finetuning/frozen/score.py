"""Scores frozen features in the modes without the training loop: few_shot, knn, linear_probe."""

from __future__ import annotations

import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from torch import nn

from mae_vit.config.command_line import Arguments
from mae_vit.config.load import dump_config, read_run_config
from mae_vit.core.errors import InputError, RemoteError, RemoteUnavailable
from mae_vit.core.files import write_atomically
from mae_vit.core.messages import count_of, error_reason
from mae_vit.evaluation.metrics import Predictions, interval_of_share
from mae_vit.finetuning.config.modes import unused_options
from mae_vit.finetuning.config.schema import FinetuneConfig
from mae_vit.finetuning.frozen.closed_form import score_in_closed_form
from mae_vit.finetuning.frozen.features import Frozen, open_frozen
from mae_vit.finetuning.frozen.linear_probe import describe_probe, probe_bytes, score_by_probe
from mae_vit.finetuning.results import describe_interval, run_facts, write_predictions
from mae_vit.finetuning.setup import Setup
from mae_vit.runtime.ranks import barrier, gather_objects, run_on_rank_zero
from mae_vit.runtime.signals import exit_on_signal
from mae_vit.runtime.slurm import mark_slurm_progress
from mae_vit.training.engines.precision import Chosen
from mae_vit.training.identity import check_identity, run_identity
from mae_vit.training.outputs.environment import describe_environment
from mae_vit.training.outputs.run_folder import RunFolder
from mae_vit.training.plan_text import print_notes
from mae_vit.training.startup import resume_or_start, settle
from mae_vit.weights.feature_encoder import FeatureEncoder

WEIGHTS = "linear.safetensors"


def score(setup: Setup, arguments: Arguments, folder: RunFolder) -> None:
    """Scores frozen features on the test split, then those of random weights as a baseline; writes the results.

    A note names the options of `arguments` without effect.

    Raises:
        InputError: if the weights do not fit, or the results cannot be written.
    """
    ranks, say = setup.ranks, setup.ranks.rank == 0
    checkpoint = resume_or_start(setup, arguments, folder, saves=False)
    if run_on_rank_zero(lambda: is_scored(folder, setup), ranks):
        say_finished(setup, folder)
        return
    setup, precision = settle(setup, checkpoint)
    config, opened = setup.config, open_frozen(setup, say=say)
    if say:
        setup.warn_of_normalization()
        setup.warn_of_seen_labels()
    facts = {**run_facts(setup), "derived": setup.derived, "labels_seen_by_start": setup.label_overlap}
    facts |= {"notes": list(setup.notes)} if setup.notes else {}
    facts["scoring_flops"] = count_scoring_flops(setup)

    def create() -> None:
        environment = describe_environment(sys.argv, ranks.world_size)
        folder.create(dump_config(config), environment, describe_scoring(setup, precision))
        folder.write_summary("running", facts)
        note_unused(config, arguments)

    run_on_rank_zero(folder.lock, ranks)
    # Another process may have finished the run meanwhile.
    if run_on_rank_zero(lambda: is_scored(folder, setup), ranks):
        say_finished(setup, folder)
        return
    run_on_rank_zero(create, ranks)
    try:
        with exit_on_signal():
            summary = _measure_and_write(setup, opened, facts, folder)
    except Exception:
        if say:
            with suppress(OSError):
                folder.write_summary("failed", facts)
        raise
    if say:
        mark_slurm_progress()
        print("\n".join(_describe_outcome(config, summary, folder.path)))
    barrier(ranks)


def note_unused(config: FinetuneConfig, arguments: Arguments) -> None:
    """Prints which of the typed options have no effect; a probe has refused them."""
    typed = {override.partition("=")[0] for override in arguments.overrides}
    if unused := [text for text in unused_options(config, config.mode) if text.partition("=")[0] in typed]:
        named = ", ".join(unused)
        print_notes([f"{config.finetune.mode} trains nothing, so these have no effect: {named}"])


def describe_scoring(setup: Setup, precision: Chosen) -> str:
    """Returns the plan of a scoring run."""
    config, data = setup.config, setup.data
    if setup.plan is not None:
        return f"{describe_probe(setup, setup.plan, _forward_flops(setup))}\nprecision   {precision}"
    origin = f" ({setup.origin})" if setup.origin else ""
    return (
        f"{config.finetune.mode} of {setup.source}{origin}: {len(data.train):,} labeled "
        f'images, {len(data.test):,} of split "{data.test_index.split}"; {precision}'
    )


def say_finished(setup: Setup, folder: RunFolder) -> None:
    """Prints on rank 0 that the run is finished, and where its results are."""
    if setup.ranks.rank == 0:
        results = folder.path / "results.json" if setup.config.finetune.test else folder.summary
        print(f"{folder.shown()} is finished; results: {folder.shown(results)}")


def is_scored(folder: RunFolder, setup: Setup) -> bool:
    """Returns whether the folder holds this run, finished; options without effect may differ.

    Raises:
        InputError: if it holds another run.
    """
    if folder.read_status() is None or not (config := folder.read("config.yaml")):
        return False
    derived = folder.read_summary().get("derived", {})
    try:
        begun = FinetuneConfig.model_validate(read_run_config(folder.path, config))
    except ValidationError:
        raise InputError(f"{folder.shown()} has a run of another command; {folder.otherwise}") from None
    saved, identity = run_identity(begun, derived=derived).values, setup.identity
    unused = {
        text.partition("=")[0] for one in (begun, setup.config) for text in unused_options(one, one.mode)
    }
    identity = replace(identity, ignored=identity.ignored | unused)
    check_identity(saved, identity, folder.shown(), otherwise=folder.otherwise)
    return folder.read_status() == "done"


def count_scoring_flops(setup: Setup) -> float:
    """Counts the FLOPs of a scoring run: networks encode each image once, and the rest takes little."""
    data = setup.data
    encoded = len(data.train) + len(data.held_out) + len(data.test) * setup.config.finetune.test
    networks = 2 if setup.pretrained else 1  # plus the one with random weights
    return networks * encoded * _forward_flops(setup)


def _forward_flops(setup: Setup) -> float:
    return setup.costs.flops_per_image / 3


def _measure_and_write(
    setup: Setup, opened: tuple[FeatureEncoder, nn.Linear], facts: dict[str, Any], folder: RunFolder
) -> dict[str, Any]:
    """Scores, writes the results, and returns the summary; collective."""
    config, data = setup.config, setup.data
    scores, guesses, weights = _score(Frozen(setup, *opened))
    summary = {**facts, "train_top1": None, "val_top1": None, **scores}
    metric, images = ("test_top1", data.test) if config.finetune.test else ("val_top1", data.held_out)
    if (top1 := summary[metric]) is not None:
        summary["interval_95"] = interval_of_share(top1, len(images))
        if setup.pretrained is not None:
            # Free the device's memory before the second network.
            opened[0].to("cpu")
            summary |= _score_random_weights(setup, metric, summary.get("notes", []))

    def write() -> None:
        try:
            if weights is not None:
                write_atomically(folder.path / WEIGHTS, weights)
            if guesses is not None:
                write_predictions(folder, data, guesses, summary)
            folder.write_summary("done", summary)
            folder.upload()
        except RemoteUnavailable:
            raise
        except RemoteError as error:
            raise InputError(f"{error}; run the same command again") from None
        except OSError as error:
            raise InputError(
                f"results cannot be written to {folder.path} ({error_reason(error)}); make room, then run the same "
                "command again"
            ) from None

    run_on_rank_zero(write, setup.ranks)
    return summary


def _score(frozen: Frozen) -> tuple[dict[str, Any], Predictions | None, bytes | None]:
    """Returns entries of the summary, predictions of test images, and the content of `WEIGHTS`; collective."""
    frozen.encoder.place(frozen.setup.device)
    if frozen.setup.plan is None:
        return *score_in_closed_form(frozen), None
    scores, guesses, probe = score_by_probe(frozen, frozen.setup.plan)
    return scores, guesses, probe_bytes(probe, frozen.setup)


def _score_random_weights(setup: Setup, metric: str, notes: list[str]) -> dict[str, Any]:
    """Scores the same network with random weights, or returns a note why it cannot; collective."""
    try:
        frozen = Frozen(setup, *_open_on_all(setup))
        return {"random_weights_top1": _score(frozen)[0][metric]}
    except Exception as error:  # the scores of the pretrained weights still count
        # Bad input fails on all ranks together. After any other error the others would wait for this rank.
        if setup.ranks.world_size > 1 and not isinstance(error, InputError):
            raise
        note = f"random weights could not be measured to compare with: {error_reason(error)}"
        print_notes([note] if setup.ranks.rank == 0 else [])
        return {"notes": [*notes, note]}


def _open_on_all(setup: Setup) -> tuple[FeatureEncoder, nn.Linear]:
    """Opens the network with random weights; raises InputError on all ranks if any rank fails; collective."""
    model, reason = None, None
    try:
        model = open_frozen(setup, random=True)
    except Exception as error:  # whatever a third-party network raises
        reason = error_reason(error)
    if reasons := [*filter(None, gather_objects(reason, setup.ranks))]:
        raise InputError(reasons[0])
    assert model is not None
    return model


def _describe_outcome(config: FinetuneConfig, summary: dict[str, Any], path: Path) -> list[str]:
    """Returns the lines to print about results and files."""
    mode, test = (
        ", ".join(filter(None, (config.finetune.mode, summary["start_origin"]))),
        config.finetune.test,
    )
    images = summary["test_size" if test else "val_size"]
    if test:
        constant = f"always the most frequent class: {summary['test_most_frequent']:.2%}"
        lines = [f"done: test {summary['test_top1']:.2%} of {images:,} images ({mode}; {constant})"]
    else:
        unread = "the test split was not read (finetune.test=false)"
        lines = [f"done: validation {summary['val_top1']:.2%} of {images:,} images ({mode}); {unread}"]
    if "interval_95" in summary:
        low, high = summary["interval_95"]
        lines.append(describe_interval(summary))
        if (random := summary.get("random_weights_top1")) is not None:
            way = "more" if low > random else "less" if high < random else "no clear difference"
            lines[-1] += f"; the same network with random weights has {random:.2%}: {way}"
    if "probe_rates" in summary:
        rates = summary["probe_rates"]
        lines += [
            f"  rate {row['lr']:<9.3g} validation "
            + ("too large" if row["val_top1"] is None else f"{row['val_top1']:.2%}")
            + (", chosen" if row["lr"] == summary["probe_lr"] else "")
            for row in (rates if len(rates) > 1 else ())
        ]
        lines += [f"  reading   {summary['reading']}"] if "reading" in summary else []
        onto = "the pretrained encoder" if summary["start"] else "random weights, which are not kept"
        lines.append(f"  weights   {path / WEIGHTS} (onto {onto})")
    lines.append(
        f"  features  rank {summary['rankme']:.1f} of {summary['num_features']} (RankMe), "
        f"standard deviation {summary['feature_std']:.3f}, of the training images"
    )
    for shots, drawn in summary.get("few_shot", {}).items():
        spread = "" if drawn["std"] is None else f" +- {drawn['std']:.2%} over {len(drawn['draws'])} draws"
        lines.append(f"  {count_of(int(shots), 'shot'):>9}  {drawn['mean']:.2%}{spread}")
    return [*lines, *([f"  details   {path / 'results.json'}, {path / 'predictions.csv'}"] if test else [])]
