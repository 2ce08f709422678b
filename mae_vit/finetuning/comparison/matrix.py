"""From a comparison's config to its runs: pretraining, tuning, the cells of the table."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mae_vit.config.load import load_config
from mae_vit.core.errors import InputError
from mae_vit.core.urls import is_url
from mae_vit.data.index import open_index
from mae_vit.data.shards.dataset_json import read_dataset
from mae_vit.finetuning.comparison.config import CompareConfig, EntrySection, Labels, Mode, Overrides, slug
from mae_vit.finetuning.comparison.costs import Cost, cost_of_run, cost_of_start
from mae_vit.finetuning.comparison.jobs import Job
from mae_vit.finetuning.config.from_start import WeightsOverrides
from mae_vit.finetuning.config.schema import FinetuneConfig
from mae_vit.objectives.pretrain_config import PretrainConfig

_TUNED_BY = "val_top1"


@dataclass(frozen=True)
class Cell:
    """One cell of the table.

    Attributes:
        entry: its row.
        labels: of each class.
        mode: how it is measured.
        seed: of the run.
        point: the settings chosen for it.
        job: its run.
        fixed: whether another seed would give the same; one such cell stands for all.
    """

    entry: EntrySection
    labels: Labels
    mode: Mode
    seed: int
    point: Overrides
    job: Job
    fixed: bool = False


class Matrix:
    """All runs of a comparison; those that depend on others' results are made when these are there."""

    def __init__(self, config: CompareConfig, base: Path, folder: Path) -> None:
        """Names everything.

        Args:
            config: of the comparison.
            base: the folder that its files are named from.
            folder: where all of it goes.
        """
        self.config, self._base, self._folder = config, base, folder
        self.pretraining = {name: self._pretrain_job(name) for name in config.pretrain}

    def check(self) -> None:
        """Checks every config as far as it can be before there are starts.

        Raises:
            InputError: naming the entry.
        """
        for name, section in self.config.pretrain.items():
            with_name = self._file(section.config)
            try:
                load_config(PretrainConfig, with_name, _lines(section.set), overrides_from="set")
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
        """Checks that data are there, with as many labels as are asked for; remote ones are looked at by the runs.

        Raises:
            InputError: with what is missing.
        """
        path = self.config.data.path
        for data in {
            path,
            *(section.set.get("data.path", path) for section in self.config.pretrain.values()),
        }:
            if not is_url(data):
                read_dataset(Path(data))
        if is_url(path):
            return
        index = open_index(Path(path), self.config.set.get("data.split", "train"))
        labels = np.asarray(index.labels)
        most = int(np.bincount(labels[labels >= 0], minlength=1).max())
        asked = max((number for _, number, _ in self.rows() if number != "all"), default=0)
        if asked > most:
            raise InputError(
                f"labels_per_class: {asked} is more than any class of {path} has (most: {most:,})"
            )

    def _check_mode(self, entry: EntrySection, mode: Mode) -> None:
        path = self._file(entry.config)
        # A start that is not there yet will have its say when it is.
        start = None if entry.start in self.config.pretrain else entry.start
        # Other modes are not tuned.
        points = self.config.tuning_settings(entry) if mode == "finetune" else []
        for point in points or [{}]:
            lines = _lines(self._settings(entry, mode, point))
            amend = WeightsOverrides(start, path.stem, lines)
            try:
                load_config(FinetuneConfig, path, lines, amend=amend, overrides_from="set")
            except InputError as error:
                own = mode != "finetune" and entry.modes is None
                hint = " (or give this entry modes of its own: modes: [finetune])" if own else ""
                raise InputError(f"{error}{hint}") from None

    def modes_of(self, entry: EntrySection) -> list[Mode]:
        """How an entry is measured."""
        return entry.modes or self.config.modes

    def rows(self) -> Iterator[tuple[EntrySection, Labels, Mode]]:
        """Yields the table's groups of cells that differ only in their seed."""
        for entry in self.config.entries:
            for labels in entry.labels_per_class or self.config.labels_per_class:
                for mode in self.modes_of(entry):
                    yield entry, labels, mode

    def tuning(self) -> list[Job]:
        """Lists the runs that settings are chosen by."""
        return [
            self._tune_job(entry, labels, number, seed)
            for entry, labels, mode in self.rows()
            if mode == "finetune"
            for number in range(len(self.config.tuning_settings(entry)))
            for seed in self.config.tune_seeds
            if entry.compute_of is None and len(self.config.tuning_settings(entry)) > 1
        ]

    def chosen(self, entry: EntrySection, labels: Labels) -> tuple[Overrides, list[float]]:
        """Chooses an entry's settings: the best mean accuracy on held-out images, of equal ones the first.

        Returns:
            The settings, and the accuracies of all.
        """
        if entry.compute_of is not None:
            # As the other scratch cells: no budget of its own.
            entry = self._like(entry)
        points = self.config.tuning_settings(entry)
        if len(points) < 2:
            return (points[0] if points else {}), []
        scores = []
        for number in range(len(points)):
            found = [
                self._tune_job(entry, labels, number, seed).summary.get(_TUNED_BY)
                for seed in self.config.tune_seeds
            ]
            known = [float(score) for score in found if score is not None]
            scores.append(sum(known) / len(known) if len(known) == len(found) else -1.0)
        return points[scores.index(max(scores))], scores

    def count_cells(self) -> int:
        """How many cells the table has."""
        return sum(len(self.seeds_of(*row)) for row in self.rows())

    def seeds_of(self, entry: EntrySection, labels: Labels, mode: Mode) -> list[int]:
        """The seeds that an entry is measured with; one, where none makes a difference."""
        seeds = entry.seeds or self.config.seeds
        return seeds[:1] if self.seed_independent(entry, labels, mode) else seeds

    def seed_independent(self, entry: EntrySection, labels: Labels, mode: Mode) -> bool:
        """Whether seeds make no difference: equal rows would pass for evidence.

        With a start's weights a nearest-neighbor search draws nothing, nor does few_shot of as many
        shots as there are labels.
        """
        drawn = mode == "finetune" or mode == "linear_probe" or (mode == "few_shot" and labels == "all")
        own_shots = mode == "few_shot" and "finetune.shots" in {**self.config.set, **entry.set}
        return not (entry.start is None or drawn or own_shots)

    def cells(self, *, compute_of: bool) -> list[Cell]:
        """Lists cells: those with (or without) another one's compute.

        Raises:
            InputError: if the other one's cost is not known yet.
        """
        found = []
        for entry, labels, mode in self.rows():
            if (entry.compute_of is not None) != compute_of:
                continue
            point = self.chosen(entry, labels)[0] if mode == "finetune" else {}
            for seed in self.seeds_of(entry, labels, mode):
                more = self._steps_for(entry, labels, mode) if compute_of else {}
                job = self._cell_job(entry, labels, mode, seed, point | more)
                fixed = self.seed_independent(entry, labels, mode)
                found.append(Cell(entry, labels, mode, seed, point | more, job, fixed))
        return found

    def distinguishing_settings(self, entry: EntrySection, point: Overrides) -> Overrides:
        """Returns an entry's settings: its own and those chosen for it."""
        return {"config": entry.config, **entry.set, **point}

    def is_tuned(self, entry: EntrySection, labels: Labels) -> bool:
        """Whether all runs that its settings are chosen by are there."""
        return min(self.chosen(entry, labels)[1], default=0.0) >= 0

    def cost_before(self, entry: EntrySection) -> Cost:
        """Returns the cost of an entry's pretrained weights."""
        ours = self.pretraining.get(entry.start) if entry.start else None
        return cost_of_run(ours.summary) if ours else cost_of_start(entry.start)

    def _steps_for(self, entry: EntrySection, labels: Labels, mode: Mode) -> Overrides:
        """Returns the number of steps that cost as much as the other one's pretraining and fine-tuning."""
        other = next(one for one in self.config.entries if one.name == entry.compute_of)
        like = self._like(entry)
        seed = (other.seeds or self.config.seeds)[0]
        theirs = self._cell_job(other, labels, mode, seed, self.chosen(other, labels)[0]).summary
        own = self._cell_job(like, labels, mode, seed, self.chosen(like, labels)[0]).summary
        costs = [cost_of_run(theirs).flops, self.cost_before(other).flops]
        if None in costs or not own.get("flops_per_step"):
            raise InputError(f'"{entry.name}": the cost of "{other.name}" or "{like.name}" is not known')
        return {"train.steps": math.ceil(sum(filter(None, costs)) / own["flops_per_step"])}

    def _check_twins(self, entry: EntrySection) -> None:
        """Its cost and its settings are those of cells that must be there."""
        if others := [mode for mode in self.modes_of(entry) if mode != "finetune"]:
            raise InputError(
                f'compute_of: "{entry.name}" trains as long as another: not in mode {", ".join(others)}'
            )
        other = next(one for one in self.config.entries if one.name == entry.compute_of)
        for twin in (other, self._like(entry)):
            for what, own, theirs in (
                ("labels_per_class", entry.labels_per_class, twin.labels_per_class),
                ("modes", entry.modes, twin.modes),
            ):
                default = getattr(self.config, what)
                if missing := set(own or default) - set(theirs or default):
                    raise InputError(
                        f'compute_of: "{twin.name}" has no {what} {", ".join(map(str, missing))}'
                    )
            if "finetune" not in self.modes_of(twin):
                raise InputError(f'compute_of: "{twin.name}" is not fine-tuned')

    def _like(self, entry: EntrySection) -> EntrySection:
        """The scratch entry of the same network that is trained as long as all others."""
        for one in self.config.entries:
            if (one.compute_of, one.start, one.config, one.set) == (None, None, entry.config, entry.set):
                return one
        raise InputError(f'compute_of needs a scratch entry of the same config ("{entry.config}") and set')

    def _pretrain_job(self, name: str) -> Job:
        section = self.config.pretrain[name]
        settings = {"data.path": self.config.data.path, **section.set}
        own = self._folder / "pretrain" / slug(name)
        elsewhere = Path(section.dir) if section.dir else None
        return Job(
            f"pretrain {name}",
            elsewhere or own,
            "pretrain/run.py",
            self._file(section.config),
            tuple(_lines(settings)),
            settings["data.path"],
            notes=own if elsewhere else None,
        )

    def _tune_job(self, entry: EntrySection, labels: Labels, number: int, seed: int) -> Job:
        point = self.config.tuning_settings(entry)[number] | {"finetune.test": False}
        folder = self._folder / "tune" / slug(entry.name) / f"labels-{labels}-setting-{number}-seed-{seed}"
        name = f"tune {entry.name}, {labels} labels, setting {number}, seed {seed}"
        return self._finetuning(name, folder, entry, labels, "finetune", seed, point)

    def _cell_job(self, entry: EntrySection, labels: Labels, mode: Mode, seed: int, point: Overrides) -> Job:
        folder = self._folder / "cells" / slug(entry.name) / f"{mode}-labels-{labels}-seed-{seed}"
        name = f"{entry.name}, {labels} labels, {mode}, seed {seed}"
        return self._finetuning(name, folder, entry, labels, mode, seed, point)

    def _finetuning(
        self,
        name: str,
        folder: Path,
        entry: EntrySection,
        labels: Labels,
        mode: Mode,
        seed: int,
        point: Overrides,
    ) -> Job:
        start = entry.start
        if start in self.pretraining:
            start = str(self.pretraining[start].folder)
        settings = {
            **self._settings(entry, mode, point),
            "run.seed": seed,
            "finetune.mode": mode,
            **({} if labels == "all" else {"data.labels_per_class": labels}),
        }
        if mode == "few_shot":
            # Of all labels there are, and once: predictions and accuracy are of one and the same draw.
            shots = {} if labels == "all" else {"finetune.shots": [labels]}
            settings = {"finetune.draws": 1, **shots, **settings}
        return Job(
            name,
            folder,
            "finetune/run.py",
            self._file(entry.config),
            (*(("--ckpt", start) if start else ()), *_lines(settings)),
            self.config.data.path,
            start,
        )

    def _settings(self, entry: EntrySection, mode: Mode, point: Overrides) -> Overrides:
        shared = {**self.config.set, **entry.set, **point}
        if entry.compute_of is not None and "train.steps" in point:
            shared = {
                key: value for key, value in shared.items() if key not in ("train.epochs", "train.samples")
            }
        return {**shared, "data.path": self.config.data.path, "finetune.mode": mode}

    def _file(self, name: str) -> Path:
        """A config beside the comparison's own.

        Raises:
            InputError: if it lies where the command was given, not there.
        """
        path = Path(name) if Path(name).is_absolute() else self._base / name
        if not path.exists() and Path(name).exists():
            beside = os.path.relpath(name, self._base)
            raise InputError(
                f'config "{name}" is looked for beside the comparison, in {self._base}: give "{beside}"'
            )
        return path


def _lines(overrides: Overrides) -> list[str]:
    """As the command line has them: values in YAML's flow style, which JSON is part of."""
    return [f"{key}={json.dumps(value)}" for key, value in overrides.items()]
