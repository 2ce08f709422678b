"""The commands as functions, for scripts and notebooks: `mae_vit.pretrain`, `finetune`, `compare`, `prepare`."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mae_vit.cli.main import parse
from mae_vit.config.command_line import Arguments, ResumeMode
from mae_vit.config.load import ConfigSource, ConfigValues
from mae_vit.config.presets import find_config
from mae_vit.core.errors import InputError
from mae_vit.core.files import read_json, read_json_lines
from mae_vit.core.messages import closest_path
from mae_vit.core.user_files import expand_path, expand_text, name_given
from mae_vit.runtime.child import call_in_child
from mae_vit.weights.names import GIVEN

if TYPE_CHECKING:
    from mae_vit.weights.encoder import PretrainedEncoder

# A preset's name, a YAML file, or the sections themselves.
Config = str | os.PathLike[str] | Mapping[str, Any]
Changes = Mapping[str, Any]
Option = str | float | bool | os.PathLike[str] | Sequence[str | float | os.PathLike[str]] | None
# Options of `prepare` that are repeated for each value; others join values by commas (3,1).
_REPEATED = ("exclude",)


@dataclass(frozen=True)
class Run:
    """A finished run: its folder (`path`), and the results in it."""

    path: Path

    def __post_init__(self) -> None:
        """Converts a path that is given as text."""
        object.__setattr__(self, "path", expand_path(self.path))

    def __fspath__(self) -> str:
        """Returns the folder, so that a run can be passed as a path."""
        return str(self.path)

    @property
    def summary(self) -> dict[str, Any]:
        """Status, steps, loss and accuracies (`summary.json`); empty for a comparison."""
        path = self._file("summary.json")
        return read_json(path) if path.exists() else {}

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """One dictionary for each logged step (`metrics.jsonl`); empty if nothing was trained."""
        path = self._file("metrics.jsonl")
        return read_json_lines(path) if path.exists() else []

    @property
    def rows(self) -> list[dict[str, Any]]:
        """One dictionary for each cell of a comparison (`results.csv`), with numbers parsed; empty for other runs."""
        path = self._file("results.csv")
        if not path.exists():
            return []
        with path.open(encoding="utf-8", newline="") as file:
            rows = csv.DictReader(file)
            return [{n: text if n == "entry" else _value(text) for n, text in row.items()} for row in rows]

    def _file(self, name: str) -> Path:
        """Returns the path of a file in the folder; raises InputError if the folder does not exist."""
        if not self.path.is_dir():
            hint = f"give {self.path.parent}" if self.path.is_file() else closest_path(self.path)
            raise InputError(f"no run folder {self.path}{f'; {hint}' if hint else ''}")
        return self.path / name

    def encoder(self) -> PretrainedEncoder:
        """Loads the encoder (`mae_vit.load_encoder`); raises InputError if the run has none, such as a comparison."""
        from mae_vit.weights.encoder import PretrainedEncoder, load_encoder

        encoder = load_encoder(self.path)
        assert isinstance(encoder, PretrainedEncoder)
        return encoder


def pretrain(
    config: Config, changes: Changes | None = None, *, resume: ResumeMode | str = "auto", extend: bool = False
) -> Run:
    """Pretrains an encoder in a child process; the files equal those of `mae-vit pretrain` to the bit.

    Args:
        config: the name of a preset, a YAML file, or a mapping of sections, which names the run (`run.name`).
        changes: values to change, by dotted keys: `{"train.steps": 30}`; None unsets a key.
        resume: "auto" resumes the run if it was begun, "never" restarts; a path resumes from that checkpoint.
        extend: resume a run with another length than it began with.

    Raises:
        InputError: for invalid input, before anything is written.
        TrainingFailed: if the run cannot continue.
        KeyboardInterrupt: after Ctrl-C, once the run is saved; the same call resumes it.
        RunInterrupted: after another stop request, likewise.
    """
    return Run(call_in_child("mae_vit.pretraining.job:pretrain", _arguments(config, changes, resume, extend)))


def finetune(
    ckpt: str | os.PathLike[str] | None = None,
    config: Config | None = None,
    changes: Changes | None = None,
    *,
    resume: ResumeMode | str = "auto",
    extend: bool = False,
) -> Run:
    """Fine-tunes an encoder, or trains a network from scratch, as `mae-vit finetune` does.

    `changes`, `resume`, `extend` and errors are those of `pretrain`. `ckpt` is a run, its folder, a weights file or
    "timm:NAME"; None trains from scratch. Without a config, the recipe for the size of the run's encoder is used.
    """
    weights = None if ckpt is None else expand_text(name_given(ckpt, GIVEN))
    arguments = _arguments(config, changes, resume, extend, ckpt=weights)
    return Run(call_in_child("mae_vit.finetuning.command:finetune", arguments))


def compare(config: Config, changes: Changes | None = None) -> Run:
    """Compares pretrained weights and networks on the same labels, as `mae-vit compare` does.

    Each run is a process; as many run at a time as there are GPUs or cores. Paths in a mapping are relative to the
    current folder. `Run.rows` has a row for each cell.

    Raises:
        InputError: for invalid input.
        TrainingFailed: if some runs failed; the report has the others.
        KeyboardInterrupt: after Ctrl-C, once its runs are saved; the same call resumes it.
    """
    arguments = Arguments(_source(config), _overrides(changes), overrides_from="changes")
    return Run(call_in_child("mae_vit.comparison.main:compare", arguments))


def prepare(
    sources: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    folder: str | os.PathLike[str] | None = None,
    **options: Option,
) -> Path:
    """Writes images as shards, as `mae-vit prepare` does; returns their folder, for `data.path`.

    Args:
        sources: digits, cifar10, cifar100, a folder or an archive of images, or several of these.
        folder: output folder; None with `in_place=True`.
        **options: options of the command, with _ for -: `holdout=0.1`, `bands=[3, 1]`, `overwrite=True`.

    Raises:
        InputError: for invalid input.
    """
    paths = _paths(sources)
    paths += [] if folder is None else [name_given(folder, "an output folder")]
    words = ["prepare", *(word for name, value in options.items() for word in _option_words(name, value))]
    # A path that begins with a dash must not be taken for an option.
    arguments = parse([*words, *(f"./{path}" if str(path).startswith("-") else str(path) for path in paths)])
    arguments.run(arguments)
    return expand_path(paths[-1])


def _paths(sources: Any) -> list[str | os.PathLike[str]]:
    """Returns paths as a list; rejects objects such as data sets, tables and images before they are read."""
    paths = list(sources) if isinstance(sources, list | tuple) else [sources]
    for path in paths:
        if not isinstance(path, str | os.PathLike):
            raise InputError(
                f"sources must be folders, archives or tables on disk, not {type(path).__name__}; write a DataFrame "
                "with to_csv, a Dataset with to_parquet, images and arrays each to a file"
            )
    return paths


def _option_words(name: str, value: Any) -> list[str]:
    """Converts a keyword argument to words of the command line; none for None and False."""
    option = f"--{name.replace('_', '-')}"
    if hasattr(value, "tolist"):  # NumPy or torch
        value = value.tolist()
    if isinstance(value, Mapping | Set):
        raise InputError(f"{name} must be a list, not {type(value).__name__}, whose values have no order")
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        if name in _REPEATED:
            return [f"{option}={each}" for each in value]
        value = ",".join(map(str, value))
    # By identity, since 0 == False and 0 is a value.
    if value is None or value is False:
        return []
    return [option if value is True else f"{option}={value}"]


def _arguments(
    config: Config | None, changes: Changes | None, resume: ResumeMode | str, extend: bool, **more: Any
) -> Arguments:
    return Arguments(
        None if config is None else _source(config),
        _overrides(changes),
        resume if resume in ("auto", "never") else expand_path(resume),
        overrides_from="changes",
        extend=extend,
        **more,
    )


def _source(config: Config) -> ConfigSource:
    if isinstance(config, Mapping):
        return ConfigValues(_plain(dict(config), "config"))
    return find_config(name_given(config, "a preset, a YAML file or a mapping (vars(args) of a Namespace)"))


def _overrides(changes: Changes | None) -> list[str]:
    if not isinstance(changes, Mapping | None):
        raise InputError(f'changes must be a mapping, as {{"train.steps": 30}}, not {type(changes).__name__}')
    return [f"{key}={_plain(value, key)}" for key, value in (changes or {}).items()]


def _plain(value: Any, key: str) -> str:
    """Writes a value as JSON, which is valid YAML."""

    def convert(other: Any) -> Any:
        if isinstance(other, os.PathLike):
            return os.fspath(other)
        if isinstance(other, Mapping):
            return dict(other)
        if getattr(other, "ndim", None) == 0:  # a number of NumPy or torch
            return other.item()
        raise TypeError(f"{type(other).__name__} is not supported; give text, numbers, lists or mappings")

    try:
        return json.dumps(value, default=convert, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise InputError(f"{key}: {error}") from None


def _value(text: str) -> Any:
    """Parses a cell of a table: a number, text, or None if it is empty."""
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return text or None
