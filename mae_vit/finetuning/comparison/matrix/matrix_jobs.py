"""The runs of a comparison: where each writes, what it begins from, and the settings that it is given."""

from __future__ import annotations

import os
from pathlib import Path

from mae_vit.config.presets import find_preset
from mae_vit.core.errors import InputError
from mae_vit.finetuning.comparison.config import CompareConfig, EntrySection, Labels, Mode, Overrides, slug
from mae_vit.finetuning.comparison.jobs import Job, program_of
from mae_vit.finetuning.comparison.matrix.settings import lines_of, settings_of


class MatrixJobs:
    """Makes the runs of a comparison from its config; starts nothing."""

    def __init__(self, config: CompareConfig, base: Path, folder: Path) -> None:
        """Makes the pretraining runs.

        Args:
            config: the comparison's config.
            base: the folder of the comparison's file, from which it names other files.
            folder: the comparison's folder, which receives all runs.
        """
        self._config, self._base, self._folder = config, base, folder
        self.pretraining = {name: self._pretrain(name) for name in config.pretrain}

    def file(self, name: str) -> Path:
        """Returns the path of a config beside the comparison's own, or of the preset of that name.

        Raises:
            InputError: if it exists only relative to the working directory.
        """
        path = Path(name) if Path(name).is_absolute() else self._base / name
        if not path.exists() and Path(name).exists():
            beside = os.path.relpath(name, self._base)
            raise InputError(
                f'config "{name}" is looked for beside the comparison, in {self._base}: give "{beside}"'
            )
        preset = None if path.exists() else find_preset(name)
        return preset or path

    def tune(self, entry: EntrySection, labels: Labels, number: int, seed: int) -> Job:
        """Returns the run that tries the setting of this number on held-out images."""
        point = self._config.tuning_settings(entry)[number] | {"finetune.test": False}
        folder = self._folder / "tune" / slug(entry.name) / f"labels-{labels}-setting-{number}-seed-{seed}"
        name = f"tune {entry.name}, {labels} labels, setting {number}, seed {seed}"
        return self._finetuning(name, folder, entry, labels, self._config.tuned_mode, seed, point)

    def cell(self, entry: EntrySection, labels: Labels, mode: Mode, seed: int, point: Overrides) -> Job:
        """Returns the run of a cell of the table, with the settings `point`."""
        folder = self._folder / "cells" / slug(entry.name) / f"{mode}-labels-{labels}-seed-{seed}"
        name = f"{entry.name}, {labels} labels, {mode}, seed {seed}"
        return self._finetuning(name, folder, entry, labels, mode, seed, point)

    def _pretrain(self, name: str) -> Job:
        section = self._config.pretrain[name]
        settings = {"data.path": self._config.data.path, **section.set}
        folder = self._folder / "pretrain" / slug(name)
        elsewhere = Path(section.dir) if section.dir else None
        return Job(
            f"pretrain {name}",
            elsewhere or folder,
            program_of("pretrain"),
            self.file(section.config),
            tuple(lines_of(settings)),
            settings["data.path"],
            notes=folder if elsewhere else None,
        )

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
        start: str | None = entry.start
        if start in self.pretraining:
            start = str(self.pretraining[start].folder)
        settings = {
            **(shared := settings_of(self._config, entry, mode, point)),
            "run.seed": seed,
            "finetune.mode": mode,
            **({} if labels == "all" else {"data.labels_per_class": labels}),
            **({"data.label_draw": seed} if self._config.draws_labels(labels, mode, shared) else {}),
        }
        if mode == "few_shot":
            # One draw of all labels in the subset, so that predictions and accuracy belong to the same draw.
            shots = {} if labels == "all" else {"finetune.shots": [labels]}
            settings = {"finetune.draws": 1, **shots, **settings}
        return Job(
            name,
            folder,
            # Rows are trained under the same rules: none by another batch than it was given.
            (*program_of("finetune"), "--same-batch"),
            self.file(entry.config),
            (*(("--ckpt", start) if start else ()), *lines_of(settings)),
            self._config.data.path,
            start,
        )
