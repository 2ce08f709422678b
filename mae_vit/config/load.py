"""Reads, overrides and checks a config: one YAML file per run.

An unknown key, a wrong type or an impossible value is one readable line that names
the key, the value and the nearest valid choice (`InputError`), before anything is
built. Command-line overrides `key.path=value` go through the same check.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from ruamel.yaml import YAML

from mae_vit.config.explain import Document, explain
from mae_vit.config.overrides import (
    apply_override,
    drop_alternatives,
    drop_options_of_others,
    parse_override,
    replaced_durations,
)
from mae_vit.config.presets import hint_at_config
from mae_vit.config.schema import Config
from mae_vit.config.typed_yaml import parse_yaml
from mae_vit.core.errors import InputError
from mae_vit.core.messages import count_of, error_reason
from mae_vit.core.user_files import read_text

# A config is a page of text; a larger one is a wrong file.
MAX_CONFIG_BYTES = 1 << 20
_MAX_MISTAKES = 10
ConfigType = TypeVar("ConfigType", bound=BaseModel)


@dataclass(frozen=True)
class ConfigValues:
    """A config that Python code gives as values, in place of a file; messages call it `config`.

    Attributes:
        text: the values, as YAML.
    """

    text: str

    def __str__(self) -> str:
        return "config"


ConfigSource = Path | ConfigValues


def load_config(
    schema: type[ConfigType],
    source: ConfigSource,
    overrides: Sequence[str] = (),
    *,
    amend: Callable[[dict[str, Any]], None] | None = None,
    overrides_from: str = "command line",
    notes: list[str] | None = None,
) -> ConfigType:
    """Reads, overrides and checks a config.

    Args:
        schema: the config class of the job.
        source: a YAML 1.2 file (so that `1e-3` is a number and `no` a string), or values.
            `run.name` defaults to the file's stem.
        overrides: `key.path=value`, the value as given where the key is text, else in YAML. It takes the place of the
            file's value, of other ways of giving the same thing, and of the options of what is no longer
            chosen (`optim.name=sgd` those of AdamW); `null` unsets a key.
        amend: changes what the file says, before the overrides.
        overrides_from: who gave the overrides, for messages.
        notes: gains a sentence for each duration of the file that an override gives in another unit.

    Raises:
        InputError: a line for each mistake: the key, the value and the nearest valid choice, and whether
            the file or the overrides must be changed.
    """
    text, path = _read(source), Path(str(source))
    mistakes: list[str] = []
    changed = _assemble(schema, source, text, overrides, amend, mistakes, notes)
    config, problems = _check(schema, changed)
    if config is not None and not mistakes:
        return config
    # What is wrong without the overrides too is the file's.
    of_file = _check(schema, _assemble(schema, source, text, (), amend, []))[1] if overrides else problems
    mistakes += [f"{path if problem in of_file else overrides_from}: {problem}" for problem in problems]
    more = len(mistakes) - _MAX_MISTAKES
    raise InputError(
        *mistakes[:_MAX_MISTAKES], *([f"and {count_of(more, 'mistake')} more"] if more > 0 else [])
    )


def _read(source: ConfigSource) -> str:
    if isinstance(source, ConfigValues):
        return source.text
    try:
        if source.stat().st_size > MAX_CONFIG_BYTES:
            raise InputError(f"{source} is larger than {MAX_CONFIG_BYTES} bytes: not a config")
        return read_text(source)
    except (FileNotFoundError, IsADirectoryError) as error:
        hint = hint_at_config(source)
        raise InputError(
            f"cannot read config {source}: {error_reason(error)}{f'; {hint}' if hint else ''}"
        ) from None
    except OSError as error:
        raise InputError(f"cannot read config {source}: {error_reason(error)}") from None


def _assemble(
    schema: type[BaseModel],
    source: ConfigSource,
    text: str,
    overrides: Sequence[str],
    amend: Callable[[dict[str, Any]], None] | None,
    mistakes: list[str],
    notes: list[str] | None = None,
) -> Document:
    """Reads the file's text and changes it as the command line says; overrides that fail go to `mistakes`."""
    path = Path(str(source))
    raw = parse_yaml(text, str(path), schema)
    if raw is None:
        raise InputError(f"{path} is empty: a config is a mapping of sections")
    if not isinstance(raw, dict):
        raise InputError(f"{path}: a config is a mapping of sections, not {type(raw).__name__}")
    if amend is not None:
        amend(raw)
    parsed: list[tuple[str, str, Any]] = []
    for override in overrides:
        try:
            parsed.append((override, *parse_override(schema, override)))
        except InputError as error:
            mistakes += error.lines
    given = {key: value for _, key, value in parsed if value is not None}
    if notes is not None:
        notes += replaced_durations(raw, given, path.name)
    drop_alternatives(raw, given)
    for _, key, value in parsed:
        drop_options_of_others(schema, raw, key, str(value))
    for override, key, value in parsed:
        try:
            apply_override(schema, raw, override, key.split("."), value)
        except InputError as error:
            mistakes += error.lines
    run = raw.setdefault("run", {})
    if isinstance(run, dict) and isinstance(source, Path):
        run.setdefault("name", source.stem)
    return Document(raw, path, {key for _, key, _ in parsed})


def _check(schema: type[ConfigType], document: Document) -> tuple[ConfigType | None, list[str]]:
    """Checks plain data against a schema: returns the config, or None and what is wrong."""
    try:
        return schema.model_validate(document.raw), []
    except ValidationError as error:
        return None, explain(schema, document, error)
    except RecursionError:
        raise InputError(f"{document.path}: nested too deeply") from None


def dump_config(config: Config) -> str:
    """Returns the resolved config as YAML."""
    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style = False
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
    stream = io.StringIO()
    yaml.dump(config.model_dump(mode="json"), stream)
    return stream.getvalue()


def read_run_config(run: Path) -> dict[str, Any]:
    """Reads the config that a run has left in its folder, as plain data.

    Raises:
        InputError: if there is none.
    """
    path = run / "config.yaml"
    try:
        content = parse_yaml(read_text(path), str(path))
    except FileNotFoundError:
        raise InputError(f"{run} is no run folder: it has no config.yaml") from None
    except OSError as error:
        raise InputError(f"cannot read {path}: {error_reason(error)}") from None
    if not isinstance(content, dict):
        raise InputError(f"{path} is no config of a run")
    return content
