"""Foresees what a comparison's runs meet here: folders of other runs, and how long each run takes.

It sets runs up as they do themselves, and tries some steps of each kind of network.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import replace
from io import StringIO
from shlex import quote
from statistics import fmean
from typing import Any, Literal, NamedTuple

import torch

from mae_vit.comparison.config import Overrides, joined, override_words
from mae_vit.comparison.plan import Cell, ComparisonPlan, settings_with_start
from mae_vit.comparison.runner import apart, as_in_slot, cores_of_slot
from mae_vit.comparison.spec import RunSpec
from mae_vit.config.command_line import Arguments
from mae_vit.config.encoders import EncoderConfig
from mae_vit.config.load import ALTERNATIVES, load_config, read_run_config
from mae_vit.core.errors import FetchUnavailable, InputError
from mae_vit.core.urls import is_url
from mae_vit.finetuning.config.modes import MODES
from mae_vit.finetuning.config.pretrained import WeightsOverrides
from mae_vit.finetuning.config.schema import FinetuneConfig
from mae_vit.finetuning.frozen.features import open_frozen
from mae_vit.finetuning.frozen.score import count_scoring_flops
from mae_vit.finetuning.job import set_up
from mae_vit.finetuning.setup import Setup
from mae_vit.finetuning.training import Training
from mae_vit.models.encoder_file import cost_of_weights
from mae_vit.objectives.pretrain_config import PretrainConfig
from mae_vit.pretraining import setup as pretraining
from mae_vit.runtime.ranks import ALONE, choose_threads
from mae_vit.training.checkpoints.checkpoint import newest_checkpoint
from mae_vit.training.engines.precision import Precision
from mae_vit.training.identity import IMAGES, OF_THE_IMAGES
from mae_vit.training.outputs.run_folder import RunFolder
from mae_vit.training.step_time import StepTime, time_steps

# What the time of a step depends on, apart from the machine.
_KIND: Any = {
    "model": True,
    "objective": True,
    "train": {"effective_batch_size", "batch_size_per_device", "activation_checkpointing"},
    "data": {"augment", "repeats"},
}
# Sections whose values a comparison may give a run that was begun outside of it.
_SETTABLE = ("train.", "optim.", "objective.")
# A run's weights bring their geometry, but the size of the images and their channels.
_OF_THE_DATA = ("img_size", "in_chans")


class Work(NamedTuple):
    """A run's FLOPs, most and fewest that a second does here, and those of a step; None without tries, or steps."""

    flops: float
    rates: tuple[float, float] | None
    per_step: float | None = None


class Times(NamedTuple):
    """Least and most seconds of runs that are left and can be estimated."""

    seconds: dict[RunSpec, tuple[float, float]]

    def until_all_end(self, slots: int) -> tuple[float, float]:
        """Returns the least and most seconds until all runs end, so many at a time, each after those that it needs.

        Equal-compute runs are taken to begin before those that they are to equal.
        """
        # Longer runs can fit better side by side.
        least, most = sorted((self._until_all_end(slots, 0), self._until_all_end(slots, 1)))
        return least, most

    def _until_all_end(self, slots: int, bound: Literal[0, 1]) -> float:
        ends, free, waiting = dict[RunSpec, float](), [0.0] * slots, list(self.seconds)
        needs = {run: set(run.needs).difference(run.equal_compute or ()) for run in waiting}
        while waiting:
            begins = {
                run: max([min(free), *(ends.get(need, 0.0) for need in needs[run])])
                for run in waiting
                if not needs[run].intersection(waiting)
            }
            run = min(begins, key=begins.__getitem__)
            waiting.remove(run)
            ends[run] = begins[run] + self.seconds[run][bound]
            free[free.index(min(free))] = ends[run]
        return max(free)


def check_pretraining(plan: ComparisonPlan, *, dry_run: bool = False) -> None:
    """Sets up what is still to be pretrained, in a process of its own; a dry run may meet a folder in use.

    Raises:
        InputError: if a run cannot be set up; or if its folder is one where another has trained, or trains now.
    """
    if plan.pretraining:
        apart(_check_pretraining, plan, dry_run)


def _check_pretraining(plan: ComparisonPlan, dry_run: bool) -> None:
    for name, run in plan.pretraining.items():
        # Another machine may have what a run needs that it does.
        if not run.is_done() and not run.is_claimed():
            try:
                with redirect_stdout(StringIO()), redirect_stderr(StringIO()), suppress(FetchUnavailable):
                    _set_up_pretraining(run)
            except InputError as error:
                raise InputError(f"pretrain.{name}: {error}") from None
        if run.elsewhere is None or run.summary.get("run_id") == run.id:
            continue
        folder = RunFolder(run.elsewhere)
        elsewhere = f"pretrain.{name}.dir=null, which pretrains in the comparison's folder"
        checkpoint = newest_checkpoint(folder.checkpoints, warn=False)
        if folder.read_status() == "done" and not (checkpoint and checkpoint.step):
            raise InputError(
                f"pretrain.{name}: {run.elsewhere} has a finished run and no checkpoint that tells whether it is "
                f"this one; give {elsewhere}"
            )
        if checkpoint and checkpoint.step:
            _check_same(name, run, checkpoint.identity, elsewhere)
        if not run.is_claimed() and (user := folder.describe_user()):
            if not dry_run:
                raise InputError(f"pretrain.{name}: {user}, or give {elsewhere}")
            print(f"warning: pretrain.{name}: {user}", flush=True)


def _check_same(name: str, run: RunSpec, saved: Mapping[str, Any], elsewhere: str) -> None:
    """Raises InputError if the run that has trained in this run's folder has other settings."""
    with redirect_stdout(StringIO()):
        identity = _set_up_pretraining(run).identity
    if not (differing := identity.differing_keys(saved)):
        return
    values = {key: saved.get(key) for key in differing if key not in (*IMAGES, *OF_THE_IMAGES)}
    others = len(values) < len(differing)
    for group in ALTERNATIVES:  # train.epochs=5 alone, without train.steps=None
        if any(values.get(key) is not None for key in group):
            values = {key: value for key, value in values.items() if key not in group or value is not None}
    own = all(key.startswith(_SETTABLE) and isinstance(value, int | float) for key, value in values.items())
    if others:
        # If the path is the same, its images are others now.
        values["data.path"] = read_run_config(run.run_folder)["data"]["path"]
        own = own and values["data.path"] != run.overrides.get("data.path")
    words = " ".join(f"pretrain.{name}.set.{key}={quote(str(value))}" for key, value in values.items())
    as_it_is = f"To use it as it is, add {words}" if own else "Undo these changes"
    raise InputError(
        f"pretrain.{name}: {run.run_folder} has other settings: {identity.describe_differences(saved)}. "
        f"{as_it_is}; or give {elsewhere}"
    )


def estimate_times(plan: ComparisonPlan, precision: Precision, *, slots: int) -> Times:
    """Estimates runs from a few steps of each kind of network, on the cores of a slot, or from finished runs of a row.

    Scoring is as fast as the training that was tried. Times are without start-up, evaluation and saves.

    Raises:
        InputError: if a run that is left cannot be set up.
    """
    if all(run.is_done() for run in plan.runs):
        return Times({})
    meter = _Meter(plan, precision)
    with _as_a_run(slots):
        meter.count_all()
    tried = [work.rates for work in meter.works.values() if work.rates]
    finished: dict[Any, list[float]] = {}
    for run in plan.runs:
        if run.is_done():
            finished.setdefault(_kind_of(run), []).append(run.summary.get("wall_s", 0.0))
    seconds = dict[RunSpec, tuple[float, float]]()
    for run in plan.runs:
        if run.is_done():
            continue
        if alike := finished.get(_kind_of(run)):
            seconds[run] = min(alike), max(alike)
        elif tried and (work := meter.works.get(run)):
            most, fewest = work.rates or map(fmean, zip(*tried, strict=True))
            seconds[run] = work.flops / most, work.flops / fewest
    return Times(seconds)


def foresee_runs(plan: ComparisonPlan) -> list[RunSpec]:
    """Returns the comparison's runs with their FLOPs, and equal-compute runs with their steps.

    With its steps a run can begin before those that it is to equal. It gets none while settings, its own or theirs, are
    still to be chosen.

    Raises:
        InputError: if a run that is left cannot be set up.
    """
    counted = {} if all(run.is_done() for run in plan.runs) else apart(_count_runs, plan) or {}
    return [replace(run, **counted.get(run.name, {})) for run in plan.runs]


def _count_runs(plan: ComparisonPlan) -> dict[str, dict[str, Any]]:
    meter = _Meter(plan, None)
    with _as_a_run(1):
        meter.count_all()
    counted = dict[str, dict[str, Any]]()
    for run, work in meter.works.items():
        steps = None
        if equal := run.equal_compute:
            usual = meter.works.get(equal[1])
            chosen = not any(one.choice and one.choice.runs for one in (run, *equal))
            steps = math.ceil(work.flops / usual.per_step) if chosen and usual and usual.per_step else None
        counted[run.name] = {"flops": work.flops, "steps": steps}
    return counted


def _kind_of(run: RunSpec) -> tuple[object, ...]:
    """Returns what runs of one length share: the row's entry, the mode and the number of labels."""
    return run.folder.parent, *map(run.overrides.get, ("finetune.mode", "data.labels_per_class"))


class _Meter:
    """Counts the FLOPs of runs, and tries each kind of network once, unless `precision` is None."""

    def __init__(self, plan: ComparisonPlan, precision: Precision | None) -> None:
        self._plan, self._precision = plan, precision
        self._tries: dict[str, StepTime | None] = {}
        self._models: dict[RunSpec, EncoderConfig] = {}
        # Weights, mode and network of which a load has shown that they fit.
        self._fitting: set[tuple[str | None, str, str]] = set()
        self.works: dict[RunSpec, Work] = {}

    def count_all(self) -> None:
        """Counts all runs; raises InputError where one can never be set up."""
        for run in self._plan.pretraining.values():
            with suppress(InputError, FetchUnavailable):
                setup = _set_up_pretraining(run)
                self._models[run] = setup.config.model
                self.works[run] = self._training(setup)
        rows: dict[Any, list[Cell]] = {}
        for cell in self._plan.cells:
            rows.setdefault((cell.entry.name, cell.labels, cell.mode), []).append(cell)
        for cells in sorted(rows.values(), key=lambda cells: cells[0].run.equal_compute is not None):
            first, remote = cells[0].run, is_url(self._plan.config.data.path)
            # A row of equal compute takes the settings of another row, which counts the tries.
            tries = first.choice.runs if first.choice and first.equal_compute is None else ()
            runs = [*tries, *(cell.run for cell in cells)]
            points = first.choice.settings if first.choice else ({},)
            works = list[Work]()
            try:
                with suppress(FetchUnavailable, KeyError):
                    for point in points if tries else points[:1]:
                        works.append(self._row(cells[0], point))
                    self.works |= {**dict.fromkeys(runs, works[0]), **dict(zip(tries, works, strict=False))}
            except InputError as error:
                # It leaves remote data alone, and what to score may be still to be pretrained.
                unknown = remote or (first.pretraining and MODES[cells[0].mode].trains != "all")
                if not unknown and not all(run.is_done() for run in runs):
                    raise InputError(f"{runs[len(works)].name}: {error}") from None

    def _row(self, cell: Cell, point: Overrides) -> Work:
        setup = self._set_up(cell, point)
        if not isinstance(setup, Training):
            return Work(count_scoring_flops(setup), None)
        work = self._training(setup)
        if cell.run.equal_compute is None:
            return work
        other = cell.run.equal_compute[0]
        weights, before = other.weights, 0.0
        if other.pretraining:
            weights, before = self._models[other.pretraining].init, self.works[other.pretraining].flops
        return Work(self.works[other].flops + before + (cost_of_weights(weights).flops or 0.0), work.rates)

    def _training(self, setup: pretraining.Setup | Training) -> Work:
        config, plan, kind = setup.config, setup.plan, setup.config.model_dump_json(include=_KIND)
        if kind not in self._tries:
            asked = config.train.precision
            precision = self._precision if asked == "auto" else asked
            self._tries[kind] = time_steps(setup, precision) if self._precision and precision else None
        step, tried = plan.effective_batch_size * setup.costs.flops_per_image, self._tries[kind]
        rates = (step / tried.least_s, step / tried.most_s) if tried else None
        return Work(plan.total_steps * step, rates, step)

    def _set_up(self, cell: Cell, point: Overrides) -> Setup:
        """Sets up a run with one of the settings to choose from.

        Weights that are still to be pretrained bring their geometry alone.
        """
        run, start = cell.run, cell.run.pretraining
        settings = joined(run.overrides, point)
        if start is not None:
            recipe = settings_with_start(run.config, cell.entry, cell.mode, settings)
            geometry = self._models[start].geometry()
            brought = {k: v for k, v in geometry.to_config().items() if k not in _OF_THE_DATA}
            settings = {**recipe, **{f"model.{key}": value for key, value in brought.items()}, **settings}
        words = override_words(settings)
        weights = WeightsOverrides(None if start else run.weights, run.config, words)
        config = load_config(FinetuneConfig, run.config, words, amend=weights)
        arguments = Arguments(run.config, words, dry_run=True, same_batch=True)
        setup = set_up(arguments, config, weights.weights, ALONE)
        kind = run.weights, cell.mode, config.model.model_dump_json()
        if start is None and run.weights is not None and self._precision and kind not in self._fitting:
            setup.load(setup.build()) if isinstance(setup, Training) else open_frozen(setup)
            self._fitting.add(kind)
        return setup


def _set_up_pretraining(run: RunSpec) -> pretraining.Setup:
    return pretraining.set_up(load_config(PretrainConfig, run.config, override_words(run.overrides)), ALONE)


@contextmanager
def _as_a_run(slots: int) -> Iterator[None]:
    """Gives this process the cores and threads of a run, and leaves out what the run itself will print."""
    threads = torch.get_num_threads()
    with as_in_slot({}, cores_of_slot(0, slots)), redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        torch.set_num_threads(choose_threads(ALONE)[0])
        try:
            yield
        finally:
            torch.set_num_threads(threads)
