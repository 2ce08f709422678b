"""Overrides of a config on the command line: `key.path=value`."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from mae_vit.config.keys import fields_at, one_of, options_from
from mae_vit.config.section import Section
from mae_vit.config.typed_yaml import parse_value
from mae_vit.core.errors import InputError

_DURATIONS = (
    ("train.steps", "train.epochs", "train.samples"),
    ("train.warmup_steps", "train.warmup_epochs", "train.warmup_samples"),
)
# Keys that give the same thing in different ways; an override of one replaces the file's.
_ALTERNATIVES = (
    *_DURATIONS,
    ("optim.lr", "optim.blr"),
    ("checkpoint.every_steps", "checkpoint.every_epochs"),
    ("monitor.evaluate_every_steps", "monitor.evaluate_every_epochs"),
    ("monitor.probe_every_steps", "monitor.probe_every_epochs"),
)


def replaced_durations(raw: dict[str, Any], given: Mapping[str, Any], file: str) -> list[str]:
    """Returns a sentence for each duration of the file that an override in another unit replaces."""
    section = raw.get("train")
    before = {f"train.{name}": value for name, value in section.items()} if isinstance(section, dict) else {}
    return [
        f"{key}={given[key]} takes the place of {other}={before[other]} of {file}"
        for group in _DURATIONS
        for key in group
        for other in group
        if key in given and other != key and before.get(other) is not None
    ]


def drop_alternatives(raw: dict[str, Any], overridden: Collection[str]) -> None:
    """Removes the file's keys for what an override gives by another key."""
    for group in _ALTERNATIVES:
        if not set(group).isdisjoint(overridden):
            for key in group:
                section, _, name = key.partition(".")
                if isinstance(raw.get(section), dict):
                    raw[section].pop(name, None)


def drop_options_of_others(schema: type[BaseModel], raw: dict[str, Any], key: str, choice: str) -> None:
    """Removes the file's options of a choice that an override replaces (`optim.name`, `objective.name`)."""
    *path, name = key.split(".")
    kinds: Mapping[str, Collection[str]] = {}
    for section in fields_at(schema, path):
        if (several := one_of(section)) and name in ("name", several.key):
            chosen = several.choice({**_node(raw, path), name: choice})
            if chosen is not None and chosen in several.sections:
                kinds, choice = {tag: model.model_fields for tag, model in several.sections.items()}, chosen
        elif isinstance(section.annotation, type) and issubclass(section.annotation, Section):
            kinds = section.annotation.options.get(name, {})
    node = _node(raw, path)
    for option in {option for options in kinds.values() for option in options}:
        if option not in kinds.get(choice, ()):
            node.pop(option, None)


def _node(raw: Any, path: Sequence[str]) -> dict[str, Any]:
    """Returns the mapping at a path; an empty one if there is none."""
    for part in path:
        raw = raw.get(part) if isinstance(raw, dict) else None
    return raw if isinstance(raw, dict) else {}


def parse_override(schema: type[BaseModel], override: str) -> tuple[str, Any]:
    """Splits `key.path=value`, and reads the value by the type of the key.

    Raises:
        InputError: if it has another form, or gives no value.
    """
    key, separator, text = override.partition("=")
    if not separator or not all(key.split(".")):
        raise InputError(f'override "{override}": write key.path=value, e.g. run.name=try')
    if not text:  # mostly an unset variable, as in run.name=$NAME
        raise InputError(f'override "{override}" gives no value ({key}=null is the default)')
    return key, parse_value(schema, key, text, f'override "{override}"')


def apply_override(
    schema: type[BaseModel], raw: dict[str, Any], override: str, path: Sequence[str], value: Any
) -> None:
    """Sets a value in plain data; None unsets it.

    Raises:
        InputError: if a part of the path is not a section.
    """
    node: Any = raw
    if (first := options_from(schema, path)) is not None and first < len(path):
        path = [*path[:first], ".".join(path[first:])]
    for depth, name in enumerate(path[:-1]):
        node = node.setdefault(name, {})
        if not isinstance(node, dict):
            raise InputError(f'override "{override}": {".".join(path[: depth + 1])} is not a section')
    # In a comparison's `set` the keys are dotted.
    for group in _ALTERNATIVES:
        if value is not None and path[-1] in group:
            for key in group:
                node.pop(key, None)
    fields = fields_at(schema, path)
    keeps_null = any(type(None) in getattr(field.annotation, "__args__", ()) for field in fields)
    # null resets a key that cannot be null to its default. An unknown key stays, so that the check reports it.
    if value is None and not keeps_null and (fields or path[-1] in node):
        node.pop(path[-1], None)
    else:
        node[path[-1]] = value
