"""The config of a comparison: its pretrained weights and networks, numbers of labels, and seeds."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from mae_vit.config.keys import KeysOf, key_paths, meant
from mae_vit.config.load import ALTERNATIVES
from mae_vit.config.section import Section
from mae_vit.config.typed_yaml import PathText, write_value
from mae_vit.core.messages import nearest
from mae_vit.finetuning.config.modes import MODES, ModeName
from mae_vit.finetuning.config.schema import FinetuneConfig
from mae_vit.objectives.pretrain_config import PretrainConfig

# Labels per class; "all" takes every label.
Labels = int | Literal["all"]
# Seed of the runs that choose settings; none of the table has it.
TUNE_SEED = 1000
Overrides = dict[str, Any]
FinetuneOverrides = Annotated[Overrides, KeysOf(FinetuneConfig)]
# Modes that train a whole network -> the validation metric that chooses their settings.
TUNED_BY = {name: f"val_{mode.metric}" for name, mode in MODES.items() if mode.trains == "all"}
# `start` of rows that are left out unless the comparison's key of that name is given.
PUBLISHED = "published"
# Keys that the plan sets itself -> the key of the comparison that determines the value.
OWN_KEYS = {
    "run.name": "run.name",
    "run.dir": "run.dir",
    "run.seed": "seeds",
    "data.path": "data.path",
    "data.labels_per_class": "labels_per_class",
    "data.label_draw": "label_draws",
    "finetune.mode": "modes",
    "finetune.start": "start of the entry",
    # Of several draws, the predictions would be those of the last.
    "finetune.draws": "seeds",
    "finetune.test": "nothing in its place, since tuning never reads the test split",
}


class RunSection(Section):
    """The folder of the comparison: `runs/NAME`, or `dir`.

    Attributes:
        name: name of the comparison.
        dir: its folder, in place of `runs/NAME`.
    """

    name: str = Field(min_length=1)
    dir: PathText | None = None


class DataSection(Section):
    """The shards on which every row is fine-tuned and tested.

    Attributes:
        path: folder of prepared shards, or its URL.
    """

    path: PathText


class PretrainSection(Section):
    """A pretraining run. The comparison trains it if it does not exist.

    Attributes:
        config: its config file; a relative path starts at the comparison's file.
        set: overrides of the config. `data.path` is the comparison's, unless it is set here.
        dir: its run folder, which several comparisons may share; null puts it into the comparison's folder.
    """

    config: PathText
    dir: PathText | None = None
    set: Annotated[Overrides, KeysOf(PretrainConfig)] = Field(default_factory=dict)


class EntrySection(Section):
    """A row of the table: a network and its initial weights.

    Attributes:
        name: its name in the report.
        config: its fine-tuning config; a relative path starts at the comparison's file.
        start: the pretrained weights: a name in `pretrain`, or a value of `--ckpt`; null for
            scratch. "published" takes the comparison's key of that name; without it the row is left out.
        set: overrides of the config; they win over the comparison's `set`.
        tune: settings to choose from. They replace the comparison's, and must be as many.
        modes: modes of this row, in place of the comparison's.
        seeds: seeds of this row, in place of the comparison's.
        compute_of: another row's name. This row trains for as many FLOPs as the pretraining and
            fine-tuning of that one together.
        note: text beside the name in the report, for example that the row has seen more labels.
    """

    name: str = Field(min_length=1)
    config: PathText
    start: PathText | None = None
    set: FinetuneOverrides = Field(default_factory=dict)
    tune: list[FinetuneOverrides] | None = None
    modes: list[ModeName] | None = None
    seeds: list[int] | None = None
    compute_of: str | None = None
    note: str = ""


class CompareConfig(Section):
    """A comparison.

    Attributes:
        run: its name and folder.
        data: the images for fine-tuning and testing.
        set: overrides of every row's config, such as epochs and augmentation.
        pretrain: pretraining runs by name.
        published: an encoder trained by others, such as `timm:NAME`, for the rows that begin from "published".
        entries: the rows of the table.
        reference: name of the row with which the others are compared.
        labels_per_class: numbers of labels; a smaller set is part of every larger one.
        seeds: seeds of fine-tuning (order, views, head).
        label_draws: each seed draws its own labels and validation images (`data.label_draw`), so that the intervals
            cover the choice of labels too; otherwise they are the same for all seeds.
        modes: the modes in which pretrained weights are scored.
        tune: settings to choose from on validation images, for each row and number of labels.
        parallel: number of runs at the same time; "auto" is one for each GPU, or one for each core.
    """

    run: RunSection
    data: DataSection
    set: FinetuneOverrides = Field(default_factory=dict)
    pretrain: dict[str, PretrainSection] = Field(default_factory=dict)
    published: PathText | None = None
    entries: list[EntrySection] = Field(min_length=1)
    reference: str
    labels_per_class: list[Labels] = Field(default=["all"], min_length=1)
    seeds: list[int] = Field(default=[0, 1, 2], min_length=1)
    label_draws: bool = False
    modes: list[ModeName] = Field(default=["finetune"], min_length=1)
    tune: list[FinetuneOverrides] = Field(default_factory=list)
    parallel: int | Literal["auto"] = "auto"

    @classmethod
    def key_of_runs(cls, path: str) -> str:
        """Returns the comparison's key for a key of its runs, which may lack its section or be misspelled; else ""."""
        own: type[Section] = cls
        runs: dict[str, type[Section]] = {"set": FinetuneConfig, "pretrain.NAME.set": PretrainConfig}
        if path.startswith("pretrain.") and path.count(".") > 1:
            _, name, path = path.split(".", 2)
            own, runs = PretrainSection, {f"pretrain.{name}.set": PretrainConfig}
        else:
            for key, own_key in OWN_KEYS.items():
                if path in (key, key.rpartition(".")[2]) and own_key in cls.model_fields:
                    return own_key
        section, dotted, _ = path.partition(".")
        keys = {place: list(key_paths(schema, {})) for place, schema in runs.items()}
        for place, known in keys.items():
            for key in known:
                if path == key or (not dotted and path == key.rpartition(".")[2]):
                    return f"{place}.{key}"
        # Misspelled. The comparison's own keys come first.
        if section in own.model_fields or (not dotted and meant(own, {}, path)):
            return ""
        for place, schema in runs.items():
            if (not dotted or section in keys[place]) and (near := meant(schema, {}, path)):
                return f"{place}.{near[0]}"
        return ""

    @model_validator(mode="before")
    @classmethod
    def _place_published(cls, raw: Any) -> Any:
        entries = raw.get("entries") if isinstance(raw, dict) else None
        if not isinstance(entries, list):
            return raw
        encoder = raw.get(PUBLISHED)
        rows = [row for row in entries if isinstance(row, dict) and row.get("start") == PUBLISHED]
        if encoder is not None and not rows:
            raise ValueError(f'{PUBLISHED} has no effect without an entry of "start: {PUBLISHED}"')
        placed = [{**row, "start": encoder} if row in rows else row for row in entries]
        return {**raw, "entries": placed if encoder else [row for row in entries if row not in rows]}

    @model_validator(mode="after")
    def _check(self) -> CompareConfig:
        names = [entry.name for entry in self.entries]
        slugs = [slug(name) for name in names]
        if len(set(slugs)) < len(slugs):
            twice = next(name for name in names if slugs.count(slug(name)) > 1)
            raise ValueError(f'entries: two are called "{twice}", or nearly so; rename one')
        if self.reference not in names:
            raise ValueError(f'reference="{self.reference}" is no entry; {nearest(self.reference, names)}')
        folders = [os.path.abspath(section.dir) for section in self.pretrain.values() if section.dir]
        if len(set(folders)) < len(folders):
            twice = next(folder for folder in folders if folders.count(folder) > 1)
            raise ValueError(f"pretrain: two have the dir {twice}; give each its own")
        for number, entry in enumerate(self.entries):
            where = f"entries[{number}] ({entry.name})"
            self._check_entry(entry, where)
            _check_once(entry, f"{where}: ")
            _check_own_keys([entry.set, *(entry.tune or [])], where)
        _check_once(self)
        _check_own_keys([self.set], "set")
        _check_own_keys(self.tune, "tune")
        self._check_modes()
        if self.parallel != "auto" and self.parallel < 1:
            raise ValueError(f"parallel={self.parallel}: must be at least 1, or auto")
        if any(TUNE_SEED in seeds for seeds in (self.seeds, *(entry.seeds or [] for entry in self.entries))):
            raise ValueError(
                f"seeds: {TUNE_SEED} is that of tuning runs; give another, so that no run chooses itself"
            )
        return self

    @property
    def segments(self) -> bool:
        """Whether the comparison measures segmentation."""
        return any(MODES[mode].labels == "mask" for mode in self._all_modes())

    @property
    def tuned_mode(self) -> ModeName:
        """The mode in which settings are chosen."""
        return "segment" if self.segments else "finetune"

    def _all_modes(self) -> list[ModeName]:
        return sorted({mode for entry in self.entries for mode in entry.modes or self.modes})

    def _check_modes(self) -> None:
        modes = self._all_modes()
        if len({MODES[mode].labels for mode in modes}) > 1:
            raise ValueError(
                f"modes: {', '.join(modes)} measure different things; compare segmentation separately"
            )
        if len(self.tune) > 1 and not any(mode in TUNED_BY for mode in modes):
            raise ValueError(f"tune has no effect with modes={modes}; it needs {' or '.join(TUNED_BY)}")

    def _check_entry(self, entry: EntrySection, where: str) -> None:
        others = {other.name: other for other in self.entries if other is not entry}
        if entry.compute_of is not None:
            other = others.get(entry.compute_of)
            if other is None or other.compute_of is not None:
                raise ValueError(
                    f'{where}: compute_of="{entry.compute_of}" is not another entry; '
                    f"{nearest(entry.compute_of, others)}"
                )
            if entry.tune is not None:
                raise ValueError(f"{where}: compute_of takes the scratch entry's settings; leave tune out")
        if entry.tune is not None and len(entry.tune) != len(self.tune):
            raise ValueError(
                f"{where}: tune has length {len(entry.tune)} here, {len(self.tune)} elsewhere; give all the same length"
            )

    def tuning_settings(self, entry: EntrySection) -> list[Overrides]:
        """Returns the settings that an entry is tuned over."""
        return self.tune if entry.tune is None else entry.tune


def _check_once(section: CompareConfig | EntrySection, where: str = "") -> None:
    for key in ("labels_per_class", "seeds", "modes"):
        values = getattr(section, key, None) or []
        if len(set(values)) < len(values):
            raise ValueError(f"{where}{key}={values} has one twice; give each once")


def _check_own_keys(overrides: Sequence[Overrides], where: str) -> None:
    for key in (key for settings in overrides for key in settings):
        if key in OWN_KEYS:
            raise ValueError(f'{where}: "{key}" belongs to the comparison; use {OWN_KEYS[key]}')


def slug(name: str) -> str:
    """Turns a name into a part of a path, and of a run's name; a digest stands for letters that are not ASCII."""
    letters = name.lower()
    kept = "".join(letter if letter.isascii() and letter.isalnum() else " " for letter in letters).split()
    if not kept or any(letter.isalnum() and not letter.isascii() for letter in letters):
        kept.append(hashlib.sha1(letters.encode()).hexdigest()[:8])
    return "-".join(kept)


def joined(shared: Overrides, own: Overrides) -> Overrides:
    """Joins overrides; `own` win, also over a key that gives the same thing: train.epochs over train.steps."""
    given = {key for key, value in own.items() if value is not None}
    replaced = {key for group in ALTERNATIVES if not given.isdisjoint(group) for key in group}
    return {**{key: value for key, value in shared.items() if key not in replaced}, **own}


def override_words(overrides: Overrides) -> list[str]:
    """Formats overrides as words of a command line."""
    return [f"{key}={write_value(value)}" for key, value in overrides.items()]
