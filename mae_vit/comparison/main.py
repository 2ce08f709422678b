"""Runs a comparison: checks, pretraining, tuning, cells, report; `--dry-run` describes it."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from statistics import fmean
from types import FrameType
from typing import Literal

import numpy as np
from filelock import FileLock

from mae_vit.comparison.config import (
    OWN_KEYS,
    TUNED_BY,
    CompareConfig,
    EntrySection,
    joined,
    override_words,
)
from mae_vit.comparison.foresee import Times, check_pretraining, estimate_times, foresee_runs
from mae_vit.comparison.plan import Cell, ComparisonPlan, data_folder
from mae_vit.comparison.protocol import (
    describe_unfinished,
    keep_protocol,
    read_protocol,
    recorded_inputs,
)
from mae_vit.comparison.report.page import write_report
from mae_vit.comparison.report.rows import describe_labels, row_title
from mae_vit.comparison.runner import Bar, Runner, count_slots
from mae_vit.comparison.spec import RunSpec
from mae_vit.config.command_line import Arguments
from mae_vit.config.load import load_config
from mae_vit.core.errors import InputError
from mae_vit.core.messages import count_of, error_reason, format_duration
from mae_vit.core.urls import is_url, redact_url
from mae_vit.data.index import open_index
from mae_vit.data.shards.dataset_json import read_dataset
from mae_vit.finetuning.config.modes import ModeName
from mae_vit.finetuning.config.pretrained import WeightsOverrides, read_values
from mae_vit.finetuning.config.recipes import what_is_missing
from mae_vit.finetuning.config.schema import FinetuneConfig
from mae_vit.models.encoder_file import cost_of_weights
from mae_vit.objectives.pretrain_config import PretrainConfig
from mae_vit.runtime.device import choose_device
from mae_vit.runtime.failures import RunInterrupted, TrainingFailed
from mae_vit.runtime.signals import STOP_SIGNALS, early_signal, handling
from mae_vit.training.engines.precision import Chosen, Precision, choose_precision, fixed
from mae_vit.training.identity import flatten

# Keys of the comparison that the plan does not set for all runs.
_DEFAULTS = {
    "finetune.start": None,
    "finetune.test": True,
    "data.labels_per_class": None,
    "data.label_draw": 0,
}


def compare(arguments: Arguments, *, report: bool = False) -> Path:
    """Runs all that is missing and writes the report, or only that of finished runs; returns the comparison's folder.

    Raises:
        InputError: if config, data or weights do not fit, or if there is no finished run to report.
        TrainingFailed: if runs failed; the report covers the others.
        RunInterrupted: if it was stopped, after the runs have saved.
    """
    source = arguments.config
    assert source is not None
    config = load_config(CompareConfig, source, arguments.overrides, overrides_from=arguments.overrides_from)
    places = {"run.dir": config.run.dir, **{f"pretrain.{n}.dir": s.dir for n, s in config.pretrain.items()}}
    for key, place in places.items():
        if place and is_url(place):
            raise InputError(f"{key}={redact_url(place)}: a comparison needs a folder on a disk")
    folder = Path(config.run.dir or Path("runs") / config.run.name)
    base = source.resolve().parent if isinstance(source, Path) else Path.cwd()
    protocol = read_protocol(folder)
    plan = ComparisonPlan(config, base, folder, recorded_inputs(protocol))
    if not report:
        check(plan)
        check_data(plan)
        check_pretraining(plan, dry_run=arguments.dry_run)
    if arguments.dry_run:
        print(describe_plan(plan, shared_precision(config, protocol["precision"])))
        return folder
    failed = {} if report else _run(plan)
    # Without a finished cell the report would be empty, and might replace that of other settings.
    finished = any(cell.run.is_done() for cell in plan.cells)
    if finished:
        with _writing(folder):
            write_report(plan)
    elif report:
        raise InputError(describe_unfinished(plan))
    for name, reason in failed.items():
        print(f"failed: {name}: {reason}", file=sys.stderr)
    if failed:
        others = f"{folder / 'report.html'} has the others" if finished else "there is nothing to report"
        raise TrainingFailed(f"{count_of(len(failed), 'run')} failed; {others}")
    return folder


def shared_precision(config: CompareConfig, begun: Precision | None) -> Chosen:
    """Returns the precision of runs that name none: the one that the comparison began with, on any machine.

    `begun` is the precision in the comparison's protocol, if any.
    """
    device = choose_device(config.set.get("run.device") or "auto")
    chosen = choose_precision("auto", device)
    if begun is not None:
        chosen = fixed(begun, "auto: as the comparison began", device)
    asked: Literal["auto", "fp32", "bf16", "fp16"] = config.set.get("train.precision") or "auto"
    if asked != "auto":
        # `set` is for fine-tuning: pretraining keeps the comparison's precision.
        why = f"{chosen.why}; fine-tuning is in {asked}, as set"
        chosen = Chosen(chosen.precision, why, choose_precision(asked, device).warning or chosen.warning)
    return chosen


def _run(plan: ComparisonPlan) -> dict[str, str]:
    """Runs all that is missing; returns failed runs: name -> reason."""
    with _writing(plan.folder):
        chosen = shared_precision(plan.config, read_protocol(plan.folder)["precision"])
        keep_protocol(plan, precision=chosen.precision)
    print(f"precision: {chosen}; a config that names one keeps it")
    specs = foresee_runs(plan)
    runner = Runner(count_slots(plan.config.parallel), chosen.precision)
    with _stopping(runner), closing(Bar(specs)) as bar:
        runner.run(specs, bar)
    if runner.stopped:
        print(f"stopped on {runner.stopped}; the same command resumes", file=sys.stderr)
        raise RunInterrupted(runner.stopped)
    return runner.failed


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Lets one process at a time write into the comparison's folder; raises InputError for unusable files."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / ".report.lock"):
            yield
    except OSError as error:
        raise InputError(f"{error.filename or folder}: {error_reason(error)}; give another run.dir") from None


@contextmanager
def _stopping(runner: Runner) -> Iterator[None]:
    """Stops the comparison on a signal, once the current runs have saved; a second Ctrl-C does not wait."""

    def stop(number: int, frame: FrameType | None) -> None:
        if runner.stopped and number == signal.SIGINT:
            raise KeyboardInterrupt
        runner.stop(signal.Signals(number).name)

    with handling(STOP_SIGNALS, stop):
        if early := early_signal():
            runner.stop(early)
        yield


def check(plan: ComparisonPlan) -> None:
    """Checks every config, as far as this is possible before pretraining has run.

    Raises:
        InputError: if a config is wrong; names the entry.
    """
    pretraining = {}
    for name, section in plan.config.pretrain.items():
        with _naming(f"pretrain.{name}"):
            path, words = plan.file(section.config), override_words(section.set)
            pretraining[name] = load_config(PretrainConfig, path, words, overrides_from="set")
    for entry in plan.config.entries:
        with _naming(f'entry "{entry.name}"'):
            if entry.compute_of is not None:
                other = plan.entry(entry.compute_of)
                made = pretraining.get(other.start or "")
                _check_equal_compute(plan, entry, other, made.model.init if made else other.start)
            _check_file(plan.file(entry.config))
            for mode in plan.modes(entry):
                _check_mode(plan, entry, mode)


@contextmanager
def _naming(place: str) -> Iterator[None]:
    try:
        yield
    except InputError as error:
        raise InputError(f"{place}: {error}") from None


def check_data(plan: ComparisonPlan) -> None:
    """Checks that local data exist and have enough labels. Setting runs up checks remote data.

    Raises:
        InputError: if data are missing, have no labels or no test images, or a class has too few.
    """
    path = plan.config.data.path
    for settings in (plan.config.set, *(section.set for section in plan.config.pretrain.values())):
        if not is_url(settings.get("data.path", path)):
            read_dataset(data_folder(path, settings))
    if is_url(path):
        return
    index = open_index(data_folder(path, plan.config.set), plan.config.set.get("data.split", "train"))
    # With masks, images without a label form one class.
    labels = np.maximum(index.labels, 0) if plan.config.segments else np.asarray(index.labels)
    most = int(np.bincount(labels[labels >= 0], minlength=1).max())
    if missing := what_is_missing(index.dataset, index.split, masks=plan.config.segments):
        raise InputError(f"{path} {missing}")
    asked = max((number for number in plan.config.labels_per_class if number != "all"), default=0)
    if asked > most:
        raise InputError(
            f"labels_per_class: {asked} is more than any class of {path} has; give up to {most:,}"
        )


def _check_file(path: Path) -> None:
    """Checks that a row's config file leaves what tells the rows apart to the comparison, as `set` has to."""
    values = flatten(read_values(path))
    for key, default in _DEFAULTS.items():
        if values.get(key, default) != default:
            raise InputError(
                f'{path}: "{key}" belongs to the comparison; remove it here, and use {OWN_KEYS[key]}'
            )


def _check_mode(plan: ComparisonPlan, entry: EntrySection, mode: ModeName) -> None:
    path = plan.file(entry.config)
    # Weights that are still to be pretrained are checked once they exist.
    ckpt = None if entry.start in plan.config.pretrain else entry.start
    points = plan.config.tuning_settings(entry) if mode in TUNED_BY else []
    for point in points or [{}]:
        words = override_words({**joined(plan.entry_settings(entry), point), "finetune.mode": mode})
        try:
            amend = WeightsOverrides(ckpt, path, words)
            loaded = load_config(FinetuneConfig, path, words, amend=amend, overrides_from="set")
        except InputError as error:
            by_default = mode != "finetune" and entry.modes is None
            hint = " (or give this entry its own modes, such as modes: [finetune])" if by_default else ""
            if mode == "linear_probe" and "data.augment." in str(error) and not by_default:
                own = "set: {data.augment: {crop: none, flip: false}, OTHER.KEY: null}"
                hint = f" (or give linear_probe its own entry, with {own})"
            raise InputError(f"{error}{hint}") from None
        if len(points) > 1 and not loaded.finetune.holdout:
            raise InputError(
                "tune chooses settings on validation images, and finetune.holdout=0 leaves none; set "
                "finetune.holdout, such as 0.1, or leave tune out"
            )
        remarks = amend.weights.remarks if amend.weights else {}
        # Then it is not the file in the row's identity that is read.
        if another := remarks.get("unfinished") or remarks.get("passed over"):
            raise InputError(f"start: {ckpt}: {another}; finish this run, or give a file that it exported")


def _check_equal_compute(
    plan: ComparisonPlan, entry: EntrySection, other: EntrySection, weights: str | None
) -> None:
    """Checks that the cells exist that give a `compute_of` entry its cost and settings."""
    if extra := [mode for mode in plan.modes(entry) if mode != "finetune"]:
        raise InputError(
            f'compute_of needs a mode that trains, and "{entry.name}" has {", ".join(extra)}; remove it'
        )
    if weights is not None and cost_of_weights(weights).flops is None:
        raise InputError(f'compute_of: the cost of "{other.name}" is not recorded in {weights}; leave it out')
    for needed in (other, plan.usual(entry)):
        if "finetune" not in plan.modes(needed):
            raise InputError(f'compute_of: "{needed.name}" has no mode finetune; add it')


def describe_plan(plan: ComparisonPlan, precision: Chosen) -> str:
    """Returns the plan as a tree: pretraining runs, below each the rows that use it, below each row its runs.

    `precision` is that of runs whose config names none.
    """
    slots = count_slots(plan.config.parallel)
    times = estimate_times(plan, precision.precision, slots=slots)
    lines = [
        f"comparison  {plan.folder}, {count_of(slots, 'run')} at a time",
        f"precision   {precision}; a config that names one keeps it",
        f"runs        {_progress(plan.runs)}",
        *([f"time        {_describe_sum(plan, times, slots)}"] if times.seconds else []),
    ]
    for name, run in plan.pretraining.items():
        lines.append(f"{run.name}: {_progress([run], times)}, {run.run_folder}")
        for entry in plan.config.entries:
            if entry.start == name:
                lines += _row(plan, entry, times, indent="  ")
    for entry in plan.config.entries:
        if entry.start not in plan.pretraining:
            lines += _row(plan, entry, times)
    return "\n".join([*lines, "all checks passed; nothing was run"])


def _describe_sum(plan: ComparisonPlan, times: Times, slots: int) -> str:
    """Words the time until all runs have ended, and what is not part of it."""
    unknown = sum(not run.is_done() for run in plan.runs) - len(times.seconds)
    lost = f"{count_of(unknown, 'run')} of unknown length, " if unknown else ""
    without = f"without {lost}start-up, evaluation and saves"
    return f"{_format_span(times.until_all_end(slots))}, {without}"


def _format_span(seconds: tuple[float, float]) -> str:
    least, most = map(format_duration, seconds)
    return f"about {least}" if least == most else f"{least} to {most}"


def _row(plan: ComparisonPlan, entry: EntrySection, times: Times, indent: str = "") -> list[str]:
    lines = [f"{indent}{row_title(entry)}"]
    groups: dict[tuple[object, str], list[Cell]] = {}
    for cell in plan.cells:
        if cell.entry is entry:
            groups.setdefault((cell.labels, cell.mode), []).append(cell)
    for (_, mode), cells in groups.items():
        choice, seeds = cells[0].run.choice, ", ".join(str(cell.seed) for cell in cells)
        seeds = f"seed{'s' * (len(cells) > 1)} {seeds}"
        if choice and choice.runs and entry.compute_of is None:
            lines.append(f"{indent}  tune {len(choice.runs)} settings: {_progress(choice.runs, times)}")
        after = f", as long as {entry.compute_of}" if entry.compute_of else ""
        runs = [cell.run for cell in cells]
        lines.append(
            f"{indent}  {describe_labels(cells[0].labels)}, {mode}{after}, {seeds}: {_progress(runs, times)}"
        )
    return lines


def _progress(runs: Sequence[RunSpec], times: Times | None = None) -> str:
    """Counts runs, with the mean time of those that are left."""
    spans = [times.seconds[run] for run in runs if run in times.seconds] if times else []
    least, most = (fmean(seconds) for seconds in zip(*spans, strict=True)) if spans else (0.0, 0.0)
    each = f", {_format_span((least, most))}{' each' * (len(runs) > 1)}" if spans else ""
    return f"{count_of(len(runs), 'run')}, {sum(run.is_done() for run in runs)} done{each}"
