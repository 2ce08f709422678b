"""Reads, overrides and checks a config: one YAML file per run.

An unknown key, a wrong type or an impossible value gives one readable line (`InputError`) that names the key, the value
and the nearest valid choice, before anything is built. Overrides `key.path=value` go through the same check.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from ruamel.yaml import YAML

from mae_vit.config.explain import Document, explain
from mae_vit.config.keys import KeysOf, alternatives, kinds_at, value_at
from mae_vit.config.plugins import add_plugins, import_plugins, named_plugins, not_imported
from mae_vit.config.presets import hint_at_config
from mae_vit.config.schema import Config
from mae_vit.config.section import OneOf, Section
from mae_vit.config.typed_yaml import parse_value, parse_yaml
from mae_vit.core.errors import InputError
from mae_vit.core.messages import closest_path, count_of, error_reason
from mae_vit.core.urls import redact_url
from mae_vit.core.user_files import read_text

_DURATIONS = (
    ("train.steps", "train.epochs", "train.samples"),
    ("train.warmup_steps", "train.warmup_epochs", "train.warmup_samples"),
)
# Keys that give the same thing in different ways; an override of one replaces the file's.
ALTERNATIVES = (
    *_DURATIONS,
    ("optim.lr", "optim.blr"),
    ("checkpoint.every_steps", "checkpoint.every_epochs"),
    ("monitor.evaluate_every_steps", "monitor.evaluate_every_epochs"),
)


def drop_alternatives(raw: dict[str, Any], overridden: Collection[str]) -> None:
    """Removes the file's keys for what an override gives by another key."""
    for group in ALTERNATIVES:
        if not set(group).isdisjoint(overridden):
            for key in group:
                section, _, name = key.partition(".")
                if isinstance(raw.get(section), dict):
                    raw[section].pop(name, None)


def _override(
    schema: type[BaseModel], raw: dict[str, Any], overrides: Sequence[str], mistakes: list[str]
) -> dict[str, Any]:
    """Applies overrides; returns their values by key. Messages of failures go to `mistakes`."""
    parsed: list[tuple[str, str, Any]] = []
    for override in overrides:
        key, separator, text = override.partition("=")
        try:
            if not separator or not all(key.split(".")):
                raise InputError(f'override "{override}": write key.path=value, such as run.name=try')
            if not text:  # mostly an unset variable, as in run.name=$NAME
                raise InputError(f'override "{override}" has no value; give one, or leave it out')
            parsed.append((override, key, parse_value(schema, key, text, f'override "{override}"')))
        except InputError as error:
            mistakes += error.lines
    drop_alternatives(raw, {key for _, key, value in parsed if value is not None})
    for _, key, value in parsed:
        _drop_options_of_others(schema, raw, key, str(value))
    for override, key, value in parsed:
        try:
            _apply_override(schema, raw, override, key.split("."), value)
        except InputError as error:
            mistakes += error.lines
    return {key: value for _, key, value in parsed}


def _drop_options_of_others(schema: type[BaseModel], raw: dict[str, Any], key: str, choice: str) -> None:
    """Removes the file's options of a choice that an override replaces (`optim.name`, `objective.name`)."""
    *path, name = key.split(".")
    kinds: Mapping[str, Collection[str]] = {}
    node = value_at(raw, path)
    if not isinstance(node, dict):
        return
    for section in alternatives(kinds_at(schema, path)):
        if isinstance(section, OneOf) and name in ("name", section.key):
            chosen = section.choice({**node, name: choice})
            if chosen is not None and chosen in section.sections:
                kinds = {tag: model.model_fields for tag, model in section.sections.items()}
                choice = chosen
        elif isinstance(section, type) and issubclass(section, Section):
            kinds = section.options.get(name, {})
    for option in {option for options in kinds.values() for option in options}:
        if option not in kinds.get(choice, ()):
            node.pop(option, None)


def _apply_override(
    schema: type[BaseModel], raw: dict[str, Any], override: str, path: Sequence[str], value: Any
) -> None:
    """Sets a value in plain data; None unsets it. Raises InputError if a part of the path is not a section."""
    node: Any = raw
    of_runs = False
    for depth in range(1, len(path)):
        # From here on the path is one dotted key of the runs: `set.train.epochs`.
        if any(isinstance(kind, KeysOf) for kind in kinds_at(schema, path[:depth])):
            of_runs, path = True, [*path[:depth], ".".join(path[depth:])]
            break
    for depth, name in enumerate(path[:-1]):
        node = node.setdefault(name, {})
        if not isinstance(node, dict):
            raise InputError(f'override "{override}": {".".join(path[: depth + 1])} is not a section')
    # In a comparison's `set` the keys are dotted.
    for group in ALTERNATIVES:
        if value is not None and path[-1] in group:
            for key in group:
                node.pop(key, None)
    # A null in `set` is for the runs.
    kinds = [] if of_runs else [*alternatives(kinds_at(schema, path))]
    # null resets a key that cannot be null to its default. An unknown key stays, so that the check reports it.
    if value is None and type(None) not in kinds and (kinds or path[-1] in node):
        node.pop(path[-1], None)
    else:
        node[path[-1]] = value


# A config is a page of text; a larger one is a wrong file.
MAX_CONFIG_BYTES = 1 << 20
_MAX_MISTAKES = 10
ConfigType = TypeVar("ConfigType", bound=BaseModel)


@dataclass(frozen=True)
class ConfigValues:
    """A config that Python code gives as values (YAML), in place of a file; messages call it `config`."""

    text: str

    def __str__(self) -> str:
        return "config"


ConfigSource = Path | ConfigValues


def load_config(
    schema: type[ConfigType],
    source: ConfigSource,
    overrides: Sequence[str] = (),
    *,
    imports_plugins: bool = True,
    amend: Callable[[dict[str, Any]], None] | None = None,
    overrides_from: str = "command line",
    notes: list[str] | None = None,
) -> ConfigType:
    """Reads, overrides and checks a config.

    Args:
        schema: determines which keys there are.
        source: a YAML 1.2 file (`1e-3` is a number, `no` a string), or values. `run.name` defaults to the file's stem.
        overrides: `key.path=value`; the value is taken as it is if the key is text, else as YAML. It replaces the
            file's value, its other keys for the same thing (`lr` for `blr`), and the options of a choice that changes
            (`optim.name=sgd` drops those of AdamW); `null` unsets a key.
        imports_plugins: import the modules of `run.plugins`; False for a config in a run folder, which may be someone
            else's.
        amend: changes the file's values before the overrides.
        overrides_from: who gave the overrides, for messages.
        notes: receives a sentence for each duration of the file that an override gives in another unit.

    Raises:
        InputError: a line for each mistake: where it is (file or overrides), the key, the value, the nearest choice.
    """
    text, path = _read(source), Path(str(source))
    raw = _parse(schema, text, path)
    plugins = named_plugins(raw, overrides)
    import_plugins(plugins if imports_plugins else ())
    if add_plugins(schema):
        raw = _parse(schema, text, path)  # by the types that the plug-ins added
    if amend is not None:
        amend(raw)
    as_read, mistakes = copy.deepcopy(raw), list[str]()
    overridden = _override(schema, raw, overrides, mistakes)
    if notes is not None:
        notes += _replaced_durations(as_read, overridden, path.name)
    for content in (raw, as_read):
        if isinstance(source, Path) and isinstance(run := content.setdefault("run", {}), dict):
            run.setdefault("name", source.stem)
    config, problems = _check(schema, Document(schema, raw, path, overridden))
    if config is not None and not mistakes:
        return config
    # A problem that exists without the overrides too is the file's.
    of_file = _check(schema, Document(schema, as_read, path))[1] if overrides else problems
    mistakes += [f"{path if problem in of_file else overrides_from}: {problem}" for problem in problems]
    mistakes += [
        f"{path} needs the plug-in {name}, which is code; give --plugin {name} to run it"
        for name in not_imported(plugins)
    ]
    more = len(mistakes) - _MAX_MISTAKES
    raise InputError(
        *mistakes[:_MAX_MISTAKES], *([f"and {count_of(more, 'mistake')} more"] if more > 0 else [])
    )


def _read(source: ConfigSource) -> str:
    if isinstance(source, ConfigValues):
        return source.text
    try:
        if source.stat().st_size > MAX_CONFIG_BYTES:
            raise InputError(
                f"{source} is too large for a config (over {MAX_CONFIG_BYTES} bytes); give another file"
            )
        return read_text(source)
    except OSError as error:
        wrong_path = isinstance(error, FileNotFoundError | IsADirectoryError)
        hint = hint_at_config(source) if wrong_path else ""
        reason = "; ".join(filter(None, (error_reason(error), hint)))
        raise InputError(f"cannot read config {source}: {reason}") from None


def _parse(schema: type[BaseModel], text: str, path: Path) -> dict[str, Any]:
    raw = parse_yaml(text, str(path), schema)
    if not isinstance(raw, dict):
        kind = "an empty file" if raw is None else "a list or one value"
        raise InputError(f"{path} is not a config but {kind}; write sections with keys (see mae-vit presets)")
    return raw


def _replaced_durations(raw: dict[str, Any], given: Mapping[str, Any], file: str) -> list[str]:
    """Returns a sentence for each duration of the file that an override in another unit replaces."""
    return [
        f"{key}={given[key]} replaces {other}={before} from {file}"
        for group in _DURATIONS
        for key, other in permutations(group, 2)
        if given.get(key) is not None and (before := value_at(raw, other.split("."))) is not None
    ]


def _check(schema: type[ConfigType], document: Document) -> tuple[ConfigType | None, list[str]]:
    """Checks plain data against a schema: returns the config, or None and what is wrong."""
    try:
        return schema.model_validate(document.raw), []
    except ValidationError as error:
        return None, explain(document, error)
    except RecursionError:
        raise InputError(f"{document.path} is nested too deeply for a config; flatten it") from None


def dump_config(config: Config) -> str:
    """Returns the resolved config as YAML, without credentials of a run folder behind a URL, where it will lie."""
    values = config.model_dump(mode="json")
    if config.run.dir is not None:
        values["run"]["dir"] = redact_url(config.run.dir)
    return dump_yaml(values)


def dump_yaml(values: Mapping[str, Any]) -> str:
    """Returns plain data as YAML, in their order."""
    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style = False
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
    stream = io.StringIO()
    yaml.dump(dict(values), stream)
    return stream.getvalue()


def read_run_config(run: Path, text: str | None = None) -> dict[str, Any]:
    """Reads the config in a run's folder, or its `text`, as plain data; raises InputError if there is none."""
    path = run / "config.yaml"
    try:
        content = parse_yaml(read_text(path) if text is None else text, str(path))
    except FileNotFoundError:
        if run.exists():
            raise InputError(f"{run} is not a run folder: it has no config.yaml") from None
        raise InputError("; ".join(filter(None, [f"{run} does not exist", closest_path(run)]))) from None
    except OSError as error:
        raise InputError(f"cannot read {path}: {error_reason(error)}") from None
    if not isinstance(content, dict):
        raise InputError(f"{path} is not the config of a run")
    return content
