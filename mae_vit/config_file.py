"""Reads, overrides and checks a config: one YAML file per run.

An unknown key, a wrong type or an impossible value is one readable line that names
the key, the value and the nearest valid choice (`InputError`), before anything is
built. Command-line overrides `key.path=value` go through the same check.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from mae_vit.config import Config
from mae_vit.errors import InputError, nearest

# A config is a page of text; a larger one is a wrong file.
MAX_CONFIG_BYTES = 1 << 20

# Ways of giving one thing; an override takes the place of the file's way.
_ALTERNATIVES = (
    ("train.steps", "train.epochs", "train.samples"),
    ("train.warmup_steps", "train.warmup_epochs", "train.warmup_samples"),
    ("optim.lr", "optim.blr"),
    ("checkpoint.every_steps", "checkpoint.every_epochs"),
    ("monitor.evaluate_every_steps", "monitor.evaluate_every_epochs"),
)


ConfigType = TypeVar("ConfigType", bound=Config)


def load_config(
    schema: type[ConfigType],
    path: Path,
    overrides: Sequence[str] = (),
    *,
    amend: Callable[[dict[str, Any]], None] | None = None,
) -> ConfigType:
    """Reads, overrides and checks a config.

    Args:
        schema: the config class of the job.
        path: a YAML 1.2 file (so that `1e-3` is a number and `no` a string).
            `run.name` defaults to its stem.
        overrides: `key.path=value`, the value in YAML.
        amend: changes what the file says, before the overrides.

    Raises:
        InputError: naming the key, the value and the nearest valid choice.
    """
    try:
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise InputError(f"{path} is larger than {MAX_CONFIG_BYTES} bytes: not a config")
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read config {path}: {_reason(error)}") from None
    raw = _parse_yaml(text, str(path))
    if not isinstance(raw, dict):
        raise InputError(f"{path}: a config is a mapping of sections, not {type(raw).__name__}")
    if amend is not None:
        amend(raw)
    drop_alternatives(raw, {override.partition("=")[0] for override in overrides})
    for override in overrides:
        _apply_override(raw, override)
    run = raw.setdefault("run", {})
    if isinstance(run, dict):
        run.setdefault("name", path.stem)
    return validate(schema, raw, where=str(path))


def validate(schema: type[ConfigType], raw: dict[str, Any], *, where: str) -> ConfigType:
    """Checks plain data against a schema; all problems become one line."""
    try:
        return schema.model_validate(raw)
    except ValidationError as error:
        # Unknown keys first: they are mostly what makes others missing.
        found = sorted(error.errors(), key=lambda problem: problem["type"] != "extra_forbidden")
        problems = _merge(_explain(schema, raw, problem) for problem in found)
        raise InputError(f"{where}: {'; '.join(problems[:5])}") from None
    except RecursionError:
        raise InputError(f"{where}: nested too deeply") from None


def dump_config(config: Config) -> str:
    """Returns the resolved config as YAML."""
    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style = False
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
    stream = io.StringIO()
    yaml.dump(config.model_dump(mode="json"), stream)
    return stream.getvalue()


def _parse_yaml(text: str, where: str) -> Any:
    try:
        return YAML(typ="safe", pure=True).load(text)
    except YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f" line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise InputError(f"{where}{place}: not valid YAML: {problem}") from None
    except (RecursionError, ValueError, TypeError, KeyError, OverflowError) as error:
        raise InputError(f"{where}: not valid YAML: {_reason(error)}") from None


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


def _apply_override(raw: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    path = key.split(".")
    if not separator or not all(path):
        raise InputError(f'override "{override}": write key.path=value, e.g. train.epochs=10')
    node: Any = raw
    for depth, name in enumerate(path[:-1]):
        node = node.setdefault(name, {})
        if not isinstance(node, dict):
            raise InputError(f'override "{override}": {".".join(path[: depth + 1])} is not a section')
    node[path[-1]] = _parse_yaml(text, f'override "{override}"')


def _merge(problems: Iterable[str]) -> list[str]:
    """Joins what each branch of a union has to say of one value."""
    merged: dict[str, list[str]] = {}
    for problem in problems:
        key, _, message = problem.partition(": ")
        merged.setdefault(key, []).append(message)
    return [
        ": ".join([key, " or ".join(messages)]) if messages != [""] else key
        for key, messages in merged.items()
    ]


def _explain(schema: type[BaseModel], raw: dict[str, Any], problem: Any) -> str:
    """Writes one pydantic problem as: key, what is wrong, nearest right thing."""
    location = [str(part) for part in problem["loc"]]
    kind = problem["type"]
    key = ".".join(_written_location(location, raw))
    if kind == "extra_forbidden":
        known = _known_keys(schema, location[:-1])
        return f'unknown key "{key}": {nearest(location[-1], known)}'
    if kind == "missing":
        return f'"{key}" is missing'
    if kind == "value_error":
        message = str(problem["ctx"]["error"])
        return f"{key}: {message}" if key else message
    if kind == "union_tag_invalid":
        tag, tags = problem["ctx"]["tag"], problem["ctx"]["expected_tags"].replace("'", "").split(", ")
        return f'{key}.name="{tag}": {nearest(tag, tags)}'
    message = problem["msg"][:1].lower() + problem["msg"][1:]
    value = problem["input"]
    shown = (
        repr(value) if len(repr(value)) <= 80 else f"{type(value).__name__} of {len(repr(value))} characters"
    )
    choices = problem.get("ctx", {}).get("expected")
    hint = ""
    if isinstance(value, str) and isinstance(choices, str):
        hint = f"; {nearest(value, choices.replace(' or ', ', ').replace(chr(39), '').split(', '))}"
    return f"{key}={shown}: {message}{hint}"


def _written_location(location: Sequence[str], raw: Any) -> list[str]:
    """Drops the parts of a location that name union branches rather than keys in the file."""
    written: list[str] = []
    node = raw
    for depth, part in enumerate(location):
        last = depth == len(location) - 1
        if isinstance(node, dict) and (part in node or last):
            node = node.get(part)
            written.append(part)
        elif isinstance(node, list) and part.isdigit() and int(part) < len(node):
            node = node[int(part)]
            written.append(part)
    return written


def _known_keys(schema: type[BaseModel], location: Sequence[str]) -> list[str]:
    """Lists the valid keys of the section at `location` (union branches count as a level)."""
    current: list[Any] = [schema]
    for part in location:
        found: list[Any] = []
        for item in current:
            if isinstance(item, type) and issubclass(item, BaseModel) and part in item.model_fields:
                found += _models_in(item.model_fields[part].annotation)
            elif isinstance(item, type) and issubclass(item, BaseModel):
                name = item.model_fields.get("name")
                if name is not None and part in getattr(name.annotation, "__args__", ()):
                    found.append(item)
        # A tag that no name says: any of the branches.
        current = found or current
    keys = {key for item in current for key in item.model_fields}
    return sorted(keys)


def _models_in(annotation: Any) -> list[Any]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in getattr(annotation, "__args__", ()) for model in _models_in(part)]


def _reason(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    return str(error).splitlines()[0] if str(error) else type(error).__name__
