"""Reads, overrides and checks a config: one YAML file per run.

An unknown key, a wrong type or an impossible value is one readable line that names
the key, the value and the nearest valid choice (`InputError`), before anything is
built. Command-line overrides `key.path=value` go through the same check.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from mae_vit.config import CHOICES, Config
from mae_vit.config_errors import Document, explain
from mae_vit.config_keys import fields_at, options_from
from mae_vit.errors import InputError, closest_path, reason_of

# A config is a page of text; a larger one is a wrong file.
MAX_CONFIG_BYTES = 1 << 20

# Ways of giving one thing; an override takes the place of the file's way.
_ALTERNATIVES = (
    ("train.steps", "train.epochs", "train.samples"),
    ("train.warmup_steps", "train.warmup_epochs", "train.warmup_samples"),
    ("optim.lr", "optim.blr"),
    ("checkpoint.every_steps", "checkpoint.every_epochs"),
    ("monitor.evaluate_every_steps", "monitor.evaluate_every_epochs"),
    ("monitor.probe_every_steps", "monitor.probe_every_epochs"),
)
_MAX_PROBLEMS = 5


ConfigType = TypeVar("ConfigType", bound=BaseModel)


def load_config(
    schema: type[ConfigType],
    path: Path,
    overrides: Sequence[str] = (),
    *,
    amend: Callable[[dict[str, Any]], None] | None = None,
    overrides_from: str = "command line",
) -> ConfigType:
    """Reads, overrides and checks a config.

    Args:
        schema: the config class of the job.
        path: a YAML 1.2 file (so that `1e-3` is a number and `no` a string).
            `run.name` defaults to its stem.
        overrides: `key.path=value`, the value in YAML. It takes the place of the file's
            value, of other ways of giving the same thing, and of the options of what is no longer
            chosen (`optim.name=sgd` those of AdamW); `null` unsets a key.
        amend: changes what the file says, before the overrides.
        overrides_from: who gave the overrides, for messages.

    Raises:
        InputError: naming the key, the value and the nearest valid choice, and whether
            the file or the overrides are to be changed.
    """
    try:
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise InputError(f"{path} is larger than {MAX_CONFIG_BYTES} bytes: not a config")
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise InputError(f"cannot read config {path}: {reason_of(error)}{_like(path)}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read config {path}: {reason_of(error)}") from None
    changed = _assemble(schema, path, text, overrides, amend)
    config, problems = _check(schema, changed)
    if config is not None:
        return config
    # What is wrong without the overrides too is the file's.
    of_file = _check(schema, _assemble(schema, path, text, (), amend))[1] if overrides else problems
    sources: dict[str, list[str]] = {}
    for problem in problems[:_MAX_PROBLEMS]:
        sources.setdefault(str(path) if problem in of_file else overrides_from, []).append(problem)
    raise InputError("; ".join(f"{source}: {'; '.join(found)}" for source, found in sources.items()))


def _assemble(
    schema: type[BaseModel],
    path: Path,
    text: str,
    overrides: Sequence[str],
    amend: Callable[[dict[str, Any]], None] | None,
) -> Document:
    """Reads the file's text and changes it as the command line says."""
    raw = parse_yaml(text, str(path))
    if raw is None:
        raise InputError(f"{path} is empty: a config is a mapping of sections")
    if not isinstance(raw, dict):
        raise InputError(f"{path}: a config is a mapping of sections, not {type(raw).__name__}")
    if amend is not None:
        amend(raw)
    parsed = [_parse_override(override) for override in overrides]
    drop_alternatives(raw, {key for key, value in parsed if value is not None})
    for key, value in parsed:
        if key in CHOICES:
            _drop_options_of_others(raw, key, str(value))
    for override, (key, value) in zip(overrides, parsed, strict=True):
        _apply_override(schema, raw, override, key.split("."), value)
    run = raw.setdefault("run", {})
    if isinstance(run, dict):
        run.setdefault("name", path.stem)
    return Document(raw, path, {key for key, _ in parsed})


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


def parse_yaml(text: str, where: str) -> Any:
    """Parses YAML of plain values: nothing in it runs.

    Args:
        text: of a file, or a value.
        where: it stands, for errors.

    Raises:
        InputError: if it is not valid.
    """
    try:
        return YAML(typ="safe", pure=True).load(text)
    except YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f" line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise InputError(f"{where}{place}: not valid YAML: {problem}") from None
    except (RecursionError, ValueError, TypeError, KeyError, OverflowError) as error:
        raise InputError(f"{where}: not valid YAML: {reason_of(error)}") from None


def read_run_config(run: Path) -> dict[str, Any]:
    """Reads the config that a run has left in its folder, as plain data.

    Raises:
        InputError: if there is none.
    """
    path = run / "config.yaml"
    try:
        content = parse_yaml(path.read_text(encoding="utf-8"), str(path))
    except FileNotFoundError:
        raise InputError(f"{run} is no run folder: it has no config.yaml") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {path}: {reason_of(error)}") from None
    if not isinstance(content, dict):
        raise InputError(f"{path} is no config of a run")
    return content


def drop_alternatives(raw: dict[str, Any], overridden: set[str]) -> None:
    """Takes out of the file what an override gives in another way.

    Args:
        raw: sections as read, changed in place.
        overridden: dotted keys that are going to be set.
    """
    for group in _ALTERNATIVES:
        if overridden & set(group):
            for key in group:
                section, _, name = key.partition(".")
                if isinstance(raw.get(section), dict):
                    raw[section].pop(name, None)


def _drop_options_of_others(raw: dict[str, Any], key: str, choice: str) -> None:
    """Takes out of the file the options of what an override no longer chooses."""
    *path, _ = key.split(".")
    node: Any = raw
    for part in path:
        node = node.get(part) if isinstance(node, dict) else None
    kinds = CHOICES[key]
    for options in kinds.values():
        for option in options:
            if isinstance(node, dict) and option not in kinds.get(choice, {}):
                node.pop(option, None)


def _parse_override(override: str) -> tuple[str, Any]:
    key, separator, text = override.partition("=")
    if not separator or not all(key.split(".")):
        raise InputError(f'override "{override}": write key.path=value, e.g. train.epochs=10')
    return key, parse_yaml(text, f'override "{override}"')


def _apply_override(
    schema: type[BaseModel], raw: dict[str, Any], override: str, path: Sequence[str], value: Any
) -> None:
    node: Any = raw
    if (first := options_from(schema, path)) is not None and first < len(path):
        path = [*path[:first], ".".join(path[first:])]
    for depth, name in enumerate(path[:-1]):
        node = node.setdefault(name, {})
        if not isinstance(node, dict):
            raise InputError(f'override "{override}": {".".join(path[: depth + 1])} is not a section')
    for group in _ALTERNATIVES:
        if value is not None and path[-1] in group:
            for key in group:
                node.pop(key, None)
    fields = fields_at(schema, path)
    keeps_null = any(type(None) in getattr(field.annotation, "__args__", ()) for field in fields)
    # A key that cannot be null goes back to its default. Not by an empty value, which is
    # mostly a slip (`run.name=$NAME`), nor a key that there never was.
    unset = value is None and not override.endswith("=") and not keeps_null
    if unset and (fields or path[-1] in node):
        node.pop(path[-1], None)
    else:
        node[path[-1]] = value


def _like(path: Path) -> str:
    """A hint at a config that is there, where `path` is not: in its folder, or among the shipped ones."""
    folders = Path("configs"), path.parent
    hint = closest_path(path, [found for folder in folders for found in folder.glob("*.yaml")])
    return f"; {hint}" if hint else ""
