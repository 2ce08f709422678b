"""Turns a comparison's config into its runs: pretraining, tuning, and the cells of the table.

A run's identity covers all that it reads: config, overrides, weights, data, and the runs that it needs.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from mae_vit.comparison.config import (
    TUNE_SEED,
    TUNED_BY,
    CompareConfig,
    EntrySection,
    Labels,
    Overrides,
    joined,
    slug,
)
from mae_vit.comparison.inputs import Inputs, sha1
from mae_vit.comparison.spec import FINETUNE, PRETRAIN, Choice, RunSpec
from mae_vit.config.load import drop_alternatives
from mae_vit.config.presets import find_preset
from mae_vit.core.errors import InputError
from mae_vit.data.data_path import resolve_data_path
from mae_vit.finetuning.config.modes import MODES, ModeName
from mae_vit.finetuning.config.pretrained import WITH_START, read_values
from mae_vit.training.identity import flatten


def data_folder(path: str, settings: Mapping[str, Any]) -> Path:
    """Returns the shard folder that runs with these settings read, which may lie in their cache.

    Raises:
        InputError: if the data cannot be opened or prepared.
    """
    return resolve_data_path(settings.get("data.path", path), cache_dir=settings.get("data.cache_dir")).folder


def settings_with_start(
    path: Path, entry: EntrySection, mode: ModeName, overridden: Collection[str]
) -> Overrides:
    """Returns the values of a config that apply only with pretrained weights (`with_start`), by dotted key.

    The comparison's own keys, `overridden`, are left out. The result is empty if the config is gone: a report does
    not need it.
    """
    if entry.start is None or MODES[mode].trains == "nothing":
        return {}
    sections = read_values(path).get(WITH_START)
    if not isinstance(sections, dict):
        return {}
    drop_alternatives(sections, overridden)
    recipe = {
        f"{name}.{key}": value
        for name, section in sections.items()
        if isinstance(section, dict)
        for key, value in section.items()
    }
    if MODES[mode].trains != "all":
        recipe.pop("optim.layer_decay", None)

    def is_overridden(key: str) -> bool:  # the key itself, a key below it, or one above it
        return any(
            f"{key}.".startswith(f"{other}.") or f"{other}.".startswith(f"{key}.") for other in overridden
        )

    return {key: value for key, value in recipe.items() if not is_overridden(key)}


# A network of timm's brings these itself: the comparison's shared values are for ours.
_OF_THE_ENCODER = ("model.", "finetune.pool", "finetune.head_init", "data.normalize")


@dataclass(frozen=True)
class Cell:
    """One cell of the table: a row's entry, its labels per class, mode and seed, and the run that measures it.

    If every seed gives the same result (`fixed`), one cell stands for all seeds.
    """

    entry: EntrySection
    labels: Labels
    mode: ModeName
    seed: int
    run: RunSpec
    fixed: bool = False


class ComparisonPlan:
    """All runs of a comparison, each with those that it needs; it runs nothing."""

    def __init__(
        self, config: CompareConfig, base: Path, folder: Path, recorded: Mapping[str, Any] | None = None
    ) -> None:
        """Takes the config; runs are built on demand.

        Relative paths in the config start at `base`; `folder` receives all runs. `recorded` has earlier digests, for
        inputs that are gone (`Inputs`).
        """
        self.config, self.folder = config, folder
        self.inputs = Inputs(recorded or {})
        self._base, self._recorded, self._specs = base, recorded, dict[str, RunSpec]()

    def __reduce__(self) -> tuple[Any, ...]:
        """Reaches other processes as its arguments, from which they build the same runs."""
        return ComparisonPlan, (self.config, self._base, self.folder, self._recorded)

    @cached_property
    def pretraining(self) -> dict[str, RunSpec]:
        """The pretraining runs by name."""
        runs = {}
        for name, section in self.config.pretrain.items():
            settings = {"data.path": self.config.data.path, **section.set}
            elsewhere = Path(section.dir) if section.dir else None
            path, row = self.file(section.config), self.folder / slug(f"pretrain {name}")
            spec = RunSpec(f"pretrain {name}", PRETRAIN, path, settings, row, elsewhere=elsewhere)
            runs[name] = self._identified(spec)
        return runs

    @cached_property
    def cells(self) -> list[Cell]:
        """The cells in the table's order."""
        return [
            Cell(entry, labels, mode, seed, self._cell(entry, labels, mode, seed), fixed)
            for entry, labels, mode in self.rows()
            for fixed in [self.seed_independent(entry, labels, mode)]
            for seed in (entry.seeds or self.config.seeds)[: 1 if fixed else None]
        ]

    @property
    def runs(self) -> list[RunSpec]:
        """All runs: pretraining, tuning, cells. Those of equal compute are the longest, and first.

        The others follow seed by seed, so that the report soon has every row.
        """
        seeds = [*self.config.seeds, *(seed for entry in self.config.entries for seed in entry.seeds or [])]
        ordered = sorted(
            self.cells, key=lambda cell: (cell.run.equal_compute is None, seeds.index(cell.seed))
        )
        cells = [cell.run for cell in ordered]
        tuning = dict.fromkeys(run for cell in self.cells if cell.run.choice for run in cell.run.choice.runs)
        return [*self.pretraining.values(), *tuning, *cells]

    @property
    def digests(self) -> dict[str, Any]:
        """The digests of all inputs by name."""
        return {name: digest for run in self.runs for name, digest in run.inputs.items()}

    def rows(self) -> Iterator[tuple[EntrySection, Labels, ModeName]]:
        """Yields the table's groups of cells that differ only in their seed."""
        for entry in self.config.entries:
            for labels in self.config.labels_per_class:
                for mode in self.modes(entry):
                    yield entry, labels, mode

    def modes(self, entry: EntrySection) -> list[ModeName]:
        """Returns the modes in which an entry is measured."""
        return entry.modes or self.config.modes

    def seed_independent(self, entry: EntrySection, labels: Labels, mode: ModeName) -> bool:
        """Returns whether seeds make no difference: several equal cells would look like evidence.

        With pretrained weights, `knn` draws nothing; nor does `few_shot` if it uses all labels of the subset.
        """
        drawn = mode == "few_shot" if labels == "all" else self.config.label_draws
        own_shots = mode == "few_shot" and "finetune.shots" in {**self.config.set, **entry.set}
        return not (entry.start is None or MODES[mode].trains != "nothing" or drawn or own_shots)

    def choice(self, entry: EntrySection, labels: Labels, mode: ModeName) -> Choice | None:
        """Returns the settings to choose from, with their runs; None without any."""
        if entry.compute_of is not None:
            # It is not tuned itself: it takes the settings of the scratch entry.
            entry = self.usual(entry)
        points = self.config.tuning_settings(entry) if mode in TUNED_BY else []
        if not points:
            return None
        runs = [self._tuning(entry, labels, number) for number in range(len(points)) if len(points) > 1]
        return Choice(tuple(points), tuple(runs), TUNED_BY[self.config.tuned_mode])

    def distinguishing_settings(
        self, entry: EntrySection, mode: ModeName, determined: Overrides
    ) -> Overrides:
        """Returns the settings that identify a row: config, `with_start` values, overrides, `determined` ones."""
        own = {**entry.set, **determined}
        recipe = settings_with_start(self.file(entry.config), entry, mode, {**self.config.set, **own})
        return {"config": entry.config, **recipe, **own}

    def entry(self, name: str | None) -> EntrySection:
        """Returns the entry called `name`."""
        return next(entry for entry in self.config.entries if entry.name == name)

    def usual(self, entry: EntrySection) -> EntrySection:
        """Returns the scratch entry of the same network that trains for the usual length."""
        for other in self.config.entries:
            same_network = (other.config, other.set) == (entry.config, entry.set)
            if same_network and other.compute_of is None and other.start is None:
                return other
        raise InputError(
            f'compute_of needs a scratch entry with its config ("{entry.config}") and set; add one'
        )

    def file(self, name: str) -> Path:
        """Returns the path of a config beside the comparison's own, or of the preset of that name.

        Raises:
            InputError: if it exists only relative to the working directory.
        """
        path = Path(name) if Path(name).is_absolute() else self._base / name
        if not path.exists() and Path(name).exists():
            beside = os.path.relpath(name, self._base)
            raise InputError(
                f'config "{name}" is not in {self._base} (paths start at the comparison\'s file); did you mean '
                f'"{beside}"?'
            )
        preset = None if path.exists() else find_preset(name)
        return preset or path

    def weights(self, entry: EntrySection) -> tuple[str | None, RunSpec | None]:
        """Returns an entry's weights, as `--ckpt` takes them, and the run that pretrains them."""
        pretraining = self.pretraining.get(entry.start or "")
        return (str(pretraining.run_folder), pretraining) if pretraining else (entry.start, None)

    def entry_settings(self, entry: EntrySection) -> Overrides:
        """Joins a row's overrides: the comparison's and the entry's, which win."""
        shared, start = self.config.set, entry.start
        if start is not None and start not in self.config.pretrain and self.inputs.are_of_timm(start):
            shared = {key: each for key, each in shared.items() if not f"{key}.".startswith(_OF_THE_ENCODER)}
        return {**joined(shared, entry.set), "data.path": self.config.data.path}

    def _tuning(self, entry: EntrySection, labels: Labels, number: int) -> RunSpec:
        """Returns the run that tries setting `number` on validation images."""
        name = f"tune {entry.name}, {labels} labels, setting {number}, seed {TUNE_SEED}"
        point = self.config.tuning_settings(entry)[number] | {"finetune.test": False}
        # The draw of a seed in the table: weights that have seen labels leave those out.
        seed = (entry.seeds or self.config.seeds)[0]
        settings = joined(self._settings(entry, labels, self.config.tuned_mode, seed, point), point)
        return self._identified(self._finetuning(name, entry, {**settings, "run.seed": TUNE_SEED}))

    def _cell(self, entry: EntrySection, labels: Labels, mode: ModeName, seed: int) -> RunSpec:
        name = f"{entry.name}, {labels} labels, {mode}, seed {seed}"
        choice, equal = self.choice(entry, labels, mode), None
        if entry.compute_of is not None:
            needed = self.entry(entry.compute_of), self.usual(entry)
            first = [self._cell(row, labels, mode, (row.seeds or self.config.seeds)[0]) for row in needed]
            equal = first[0], first[1]
        settings = self._settings(entry, labels, mode, seed, choice.settings[0] if choice else {})
        spec = self._finetuning(name, entry, settings)
        return self._identified(replace(spec, choice=choice, equal_compute=equal))

    def _finetuning(self, name: str, entry: EntrySection, settings: Overrides) -> RunSpec:
        weights, pretraining = self.weights(entry)
        row = self.folder / slug(entry.name)
        path = self.file(entry.config)
        return RunSpec(name, FINETUNE, path, settings, row, weights=weights, pretraining=pretraining)

    def _settings(
        self, entry: EntrySection, labels: Labels, mode: ModeName, seed: int, point: Overrides
    ) -> Overrides:
        """Returns a run's overrides without those of `point`, the tuning setting that it uses or may choose."""
        shared = self.entry_settings(entry)
        draws = self._draws_labels(entry, labels, mode, {**shared, **point})
        settings = {
            **shared,
            "finetune.mode": mode,
            "run.seed": seed,
            **({} if labels == "all" else {"data.labels_per_class": labels}),
            **({"data.label_draw": seed} if draws else {}),
        }
        if mode == "few_shot":
            # One draw of all labels in the subset, so that predictions and accuracy belong to the same draw.
            shots = {} if labels == "all" else {"finetune.shots": [labels]}
            settings = {"finetune.draws": 1, **shots, **settings}
        return settings

    def _draws_labels(self, entry: EntrySection, labels: Labels, mode: ModeName, settings: Overrides) -> bool:
        """Returns whether each seed draws its own labels or validation images; otherwise a draw has no effect."""
        path = self.file(entry.config)
        recipe = {
            **flatten(read_values(path)),
            **settings_with_start(path, entry, mode, settings),
            **settings,
        }
        held_out = MODES[mode].trains != "nothing" and recipe.get("finetune.holdout") != 0
        return self.config.label_draws and (labels != "all" or held_out)

    def _identified(self, spec: RunSpec) -> RunSpec:
        """Sets a run's identity, from what it reads and the runs that it needs, and its folder."""
        if spec.name not in self._specs:
            choice, equal, before = spec.choice, spec.equal_compute, spec.pretraining
            tested = spec.program is FINETUNE and spec.overrides.get("finetune.test", True)
            weights = None if before else spec.weights
            inputs, digests = self.inputs.identity(spec.config, spec.overrides, weights, tested=tested)
            identity = sha1(
                {
                    "job": spec.program[1],
                    **inputs,
                    **({"weights": before.id} if before else {}),
                    "settings": choice.settings if choice else (),
                    "tuning": [[run.id] for run in choice.runs] if choice else [],
                    "equal_compute": [run.id for run in equal or ()],
                }
            )
            folder = spec.folder / identity[:8]
            self._specs[spec.name] = replace(spec, id=identity, inputs=digests, folder=folder)
        return self._specs[spec.name]
