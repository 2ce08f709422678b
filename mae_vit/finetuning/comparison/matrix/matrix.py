"""Turns a comparison's config into its runs: pretraining, tuning, and the cells of the table."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from mae_vit.config.load import load_config
from mae_vit.core.errors import InputError
from mae_vit.core.urls import is_url
from mae_vit.data.index import open_index
from mae_vit.data.shards.dataset_json import read_dataset
from mae_vit.finetuning.comparison.config import (
    TUNED_BY,
    CompareConfig,
    EntrySection,
    Labels,
    Mode,
    Overrides,
)
from mae_vit.finetuning.comparison.costs import cost_of_run
from mae_vit.finetuning.comparison.inputs import data_folder
from mae_vit.finetuning.comparison.jobs import Job
from mae_vit.finetuning.comparison.matrix.cell import Cell
from mae_vit.finetuning.comparison.matrix.matrix_jobs import MatrixJobs
from mae_vit.finetuning.comparison.matrix.settings import lines_of, settings_of, settings_with_start
from mae_vit.finetuning.config.from_start import WeightsOverrides
from mae_vit.finetuning.config.schema import CLOSED_FORM, FinetuneConfig
from mae_vit.models.encoder_cost import Cost, cost_of_weights
from mae_vit.objectives.pretrain_config import PretrainConfig


class Matrix:
    """All runs of a comparison. A run that depends on results of other runs can be listed only after them."""

    def __init__(self, config: CompareConfig, base: Path, folder: Path) -> None:
        """Prepares the pretraining jobs; starts nothing.

        Args:
            config: the comparison's config.
            base: the folder of the comparison's file, from which it names other files.
            folder: the comparison's folder, which receives all runs.
        """
        self.config, self.folder = config, folder
        self._jobs = MatrixJobs(config, base, folder)
        self.pretraining = self._jobs.pretraining

    def check(self) -> None:
        """Checks every config, as far as this is possible before pretraining has run.

        Raises:
            InputError: if one is wrong; names the entry.
        """
        for name, section in self.config.pretrain.items():
            with_name = self._jobs.file(section.config)
            try:
                load_config(PretrainConfig, with_name, lines_of(section.set), overrides_from="set")
            except InputError as error:
                raise InputError(f"pretrain.{name}: {error}") from None
        for entry in self.config.entries:
            try:
                if entry.compute_of is not None:
                    self._check_twins(entry)
                for mode in self.modes_of(entry):
                    self._check_mode(entry, mode)
            except InputError as error:
                raise InputError(f'entry "{entry.name}": {error}') from None

    def check_data(self) -> None:
        """Checks that local data exist and have enough labels. The runs themselves check remote data.

        Raises:
            InputError: if data are missing, or a class has too few labels.
        """
        path = self.config.data.path
        for settings in (self.config.set, *(section.set for section in self.config.pretrain.values())):
            if not is_url(settings.get("data.path", path)):
                read_dataset(data_folder(self.config, settings))
        if is_url(path):
            return
        shards, split = data_folder(self.config, self.config.set), self.config.set.get("data.split", "train")
        index = open_index(shards, split)
        # Of masks, images without a label are one class.
        labels = np.maximum(index.labels, 0) if self.config.segments else np.asarray(index.labels)
        most = int(np.bincount(labels[labels >= 0], minlength=1).max())
        asked = max((number for _, number, _ in self.rows() if number != "all"), default=0)
        if asked > most:
            raise InputError(
                f"labels_per_class: {asked} is more than any class of {path} has (most: {most:,})"
            )

    def _check_mode(self, entry: EntrySection, mode: Mode) -> None:
        path = self._jobs.file(entry.config)
        # Weights that the comparison still has to pretrain are checked when they exist.
        start = None if entry.start in self.config.pretrain else entry.start
        points = self.config.tuning_settings(entry) if mode in TUNED_BY else []
        for point in points or [{}]:
            lines = lines_of(settings_of(self.config, entry, mode, point))
            amend = WeightsOverrides(start, path, lines)
            try:
                load_config(FinetuneConfig, path, lines, amend=amend, overrides_from="set")
            except InputError as error:
                by_default = mode != "finetune" and entry.modes is None
                hint = " (or give this entry modes of its own: modes: [finetune])" if by_default else ""
                raise InputError(f"{error}{hint}") from None

    def modes_of(self, entry: EntrySection) -> list[Mode]:
        """Returns the modes in which an entry is measured."""
        return entry.modes or self.config.modes

    def rows(self) -> Iterator[tuple[EntrySection, Labels, Mode]]:
        """Yields the table's groups of cells that differ only in their seed."""
        for entry in self.config.entries:
            for labels in entry.labels_per_class or self.config.labels_per_class:
                for mode in self.modes_of(entry):
                    yield entry, labels, mode

    def tuning(self) -> list[Job]:
        """Lists the tuning runs, by which settings are chosen."""
        return [
            self._jobs.tune(entry, labels, number, seed)
            for entry, labels, mode in self.rows()
            if mode in TUNED_BY
            for number in range(len(self.config.tuning_settings(entry)))
            for seed in self.config.tune_seeds
            if entry.compute_of is None and len(self.config.tuning_settings(entry)) > 1
        ]

    def chosen(self, entry: EntrySection, labels: Labels) -> tuple[Overrides, list[float]]:
        """Chooses an entry's settings by the best mean accuracy on held-out images; of equal ones the first.

        Returns:
            The settings, and the accuracy of each setting (-1 if a tuning run has no result).
        """
        if entry.compute_of is not None:
            # It has no tuning of its own and takes the settings of the scratch entry.
            entry = self._like(entry)
        points = self.config.tuning_settings(entry)
        if len(points) < 2:
            return (points[0] if points else {}), []
        scores = []
        for number in range(len(points)):
            run_scores = [
                self._jobs.tune(entry, labels, number, seed).summary.get(TUNED_BY[self.config.tuned_mode])
                for seed in self.config.tune_seeds
            ]
            known = [float(score) for score in run_scores if score is not None]
            scores.append(sum(known) / len(known) if len(known) == len(run_scores) else -1.0)
        return points[scores.index(max(scores))], scores

    def count_cells(self) -> int:
        """Returns the number of cells in the table."""
        return sum(len(self.seeds_of(*row)) for row in self.rows())

    def seeds_of(self, entry: EntrySection, labels: Labels, mode: Mode) -> list[int]:
        """Returns the seeds with which an entry is measured; only one if seeds make no difference."""
        seeds = entry.seeds or self.config.seeds
        return seeds[:1] if self.seed_independent(entry, labels, mode) else seeds

    def seed_independent(self, entry: EntrySection, labels: Labels, mode: Mode) -> bool:
        """Returns whether seeds make no difference. Several equal cells would look like evidence.

        With pretrained weights, `knn` draws nothing, and `few_shot` draws nothing if it uses all labels
        of the subset.
        """
        drawn = mode not in CLOSED_FORM or (mode == "few_shot" and labels == "all")
        own_shots = mode == "few_shot" and "finetune.shots" in {**self.config.set, **entry.set}
        draws = self.config.draws_labels(labels, mode, {**self.config.set, **entry.set})
        return not (entry.start is None or drawn or own_shots or draws)

    def cells(self, *, compute_of: bool) -> list[Cell]:
        """Lists the cells of entries that have `compute_of`, or of those that have not.

        Raises:
            InputError: if the cost of the other entry is not known yet.
        """
        cells = []
        for entry, labels, mode in self.rows():
            if (entry.compute_of is not None) != compute_of:
                continue
            point = self.chosen(entry, labels)[0] if mode in TUNED_BY else {}
            for seed in self.seeds_of(entry, labels, mode):
                more = self._steps_for(entry, labels, mode) if compute_of else {}
                job = self._jobs.cell(entry, labels, mode, seed, point | more)
                fixed = self.seed_independent(entry, labels, mode)
                cells.append(Cell(entry, labels, mode, seed, point | more, job, fixed))
        return cells

    def distinguishing_settings(self, entry: EntrySection, mode: Mode, point: Overrides) -> Overrides:
        """Returns an entry's config, what this says with pretrained weights alone, its own overrides, and `point`."""
        own = {**entry.set, **point}
        recipe = settings_with_start(self._jobs.file(entry.config), entry, mode, {**self.config.set, **own})
        return {"config": entry.config, **recipe, **own}

    def is_tuned(self, entry: EntrySection, labels: Labels) -> bool:
        """Returns whether all tuning runs of an entry have results."""
        return min(self.chosen(entry, labels)[1], default=0.0) >= 0

    def cost_before(self, entry: EntrySection) -> Cost:
        """Returns the cost of an entry's pretrained weights."""
        ours = self.pretraining.get(entry.start) if entry.start else None
        return cost_of_weights(str(ours.folder) if ours else entry.start)

    def pretraining_seconds(self, entry: EntrySection) -> float | None:
        """Returns how long the comparison pretrained an entry's weights; None if it did not.

        What this pretraining began from is not part of it, as the machine that trained that is not known.
        """
        if entry.start is None:
            return 0.0
        ours = self.pretraining.get(entry.start)
        return ours.summary.get("wall_s") if ours else None

    def _steps_for(self, entry: EntrySection, labels: Labels, mode: Mode) -> Overrides:
        """Returns the number of steps that cost as much as the other entry's pretraining and fine-tuning."""
        other = next(one for one in self.config.entries if one.name == entry.compute_of)
        like = self._like(entry)
        seed = (other.seeds or self.config.seeds)[0]
        theirs = self._jobs.cell(other, labels, mode, seed, self.chosen(other, labels)[0]).summary
        summary = self._jobs.cell(like, labels, mode, seed, self.chosen(like, labels)[0]).summary
        costs = [cost_of_run(theirs).flops, self.cost_before(other).flops]
        if None in costs or not summary.get("flops_per_step"):
            raise InputError(f'"{entry.name}": the cost of "{other.name}" or "{like.name}" is not known')
        return {"train.steps": math.ceil(sum(filter(None, costs)) / summary["flops_per_step"])}

    def _check_twins(self, entry: EntrySection) -> None:
        """Checks that the cells exist from which a `compute_of` entry takes its cost and its settings.

        Raises:
            InputError: if one is missing.
        """
        if others := [mode for mode in self.modes_of(entry) if mode != "finetune"]:
            raise InputError(
                f'compute_of: "{entry.name}" trains as long as another: not in mode {", ".join(others)}'
            )
        other = next(one for one in self.config.entries if one.name == entry.compute_of)
        if unknown := self._start_of_unknown_cost(other):
            raise InputError(
                f'compute_of: the cost of "{other.name}" is not known: {unknown} does not record what it cost'
            )
        for twin in (other, self._like(entry)):
            for what, of_entry, of_twin in (
                ("labels_per_class", entry.labels_per_class, twin.labels_per_class),
                ("modes", entry.modes, twin.modes),
            ):
                default = getattr(self.config, what)
                if missing := set(of_entry or default) - set(of_twin or default):
                    raise InputError(
                        f'compute_of: "{twin.name}" has no {what} {", ".join(map(str, missing))}'
                    )
            if "finetune" not in self.modes_of(twin):
                raise InputError(f'compute_of: "{twin.name}" is not fine-tuned')

    def _start_of_unknown_cost(self, entry: EntrySection) -> str | None:
        """Returns the weights that an entry, or its pretraining, begins from if they do not record their cost."""
        section = self.config.pretrain.get(entry.start or "")
        start = entry.start
        if section is not None:
            file = self._jobs.file(section.config)
            start = load_config(PretrainConfig, file, lines_of(section.set), overrides_from="set").model.init
        return start if start is not None and cost_of_weights(start).flops is None else None

    def _like(self, entry: EntrySection) -> EntrySection:
        """Returns the scratch entry of the same network that trains for the usual length."""
        for one in self.config.entries:
            if (one.compute_of, one.start, one.config, one.set) == (None, None, entry.config, entry.set):
                return one
        raise InputError(f'compute_of needs a scratch entry of the same config ("{entry.config}") and set')
