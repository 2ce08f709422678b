"""Explains keys from the schema: type, default, meaning, and the presets that set them (`mae-vit config KEY`)."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from mae_vit.config.keys import kind_of, meant, sections_in, value_at, walk_keys
from mae_vit.config.presets import preset_paths
from mae_vit.config.typed_yaml import PathText, parse_yaml, write_value
from mae_vit.core.errors import InputError
from mae_vit.core.messages import count_of, device_hint

_NAMES: dict[Any, str] = {
    **{int: "integer", float: "number", str: "text", bool: "`true` or `false`", PathText: "path"},
    **{list: "list", tuple: "list", dict: "keys and values"},
}
_WIDTH, _VALUES, _PRESETS = 100, 6, 4
# Stands for all names of sections.
_NAMED: dict[str, Any] = {"pretrain": {"NAME": {}}}


@dataclass(frozen=True)
class Key:
    """A key of a config.

    Attributes:
        path: `section.key`; free names of sections are NAME.
        field: its field.
        model: the section that has it.
        choice: `name=CHOICE` of the branch that has it; empty without branches.
        jobs: what its configs are for.
    """

    path: str
    field: FieldInfo
    model: type[BaseModel]
    choice: str
    jobs: tuple[str, ...]

    @property
    def meaning(self) -> str:
        """The sentence of the docstring; empty for sections."""
        return meanings(self.model).get(self.path.rpartition(".")[2], "")


def meanings(model: type[BaseModel]) -> dict[str, str]:
    """Returns the meaning of each key of a section, from the Attributes of its docstring and its bases'."""
    found: dict[str, str] = {}
    for part in reversed(model.__mro__):
        listed = inspect.cleandoc(part.__dict__.get("__doc__") or "").partition("Attributes:")[2]
        entries = re.findall(r"^    (\w+): (.*(?:\n        .*)*)", listed, re.MULTILINE)
        found |= {name: " ".join(text.split()).rstrip(".") for name, text in entries}
    return found


def type_in_words(annotation: Any) -> str:
    """Returns a type as choices, a number, a list; null is left out."""
    arguments, origin = get_args(annotation), get_origin(annotation)
    if origin is Literal:
        return " or ".join(f"`{_text(one)}`" for one in arguments)
    if hasattr(annotation, "__metadata__"):
        return type_in_words(arguments[0])
    if origin is list and get_origin(arguments[0]) is Literal:
        return f"list of {type_in_words(arguments[0])}"
    if origin in _NAMES:
        return _NAMES[origin]
    parts = (type_in_words(one) for one in arguments if one is not type(None))
    return _NAMES.get(annotation) or " or ".join(dict.fromkeys(parts))


def default_in_words(field: FieldInfo) -> str:
    """Returns a default; "required" or "none" if there is no value."""
    if field.is_required():
        return "required"
    default = field.get_default(call_default_factory=True)
    return "none" if default is None else f"`{_text(default)}`"


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def explain_key(asked: str, schemas: Mapping[str, type[BaseModel]]) -> list[str]:
    """Returns the lines about a key, `section.key` or `key` alone, or about the keys of a section.

    Args:
        asked: the key; a value behind it is left out.
        schemas: the configs by what they are for.

    Raises:
        InputError: if there is no such key; names the nearest.
    """
    asked = asked.partition("=")[0]
    whole = re.sub(r"^pretrain\.[^.]+", "pretrain.NAME", asked)
    # A comparison has the keys of its runs in sections: set.KEY, pretrain.NAME.set.KEY.
    inner = re.sub(r"^(pretrain\.NAME\.|entries\.)?(set\.)?", "", whole)
    keys = [Key(*key, (job,)) for job, schema in schemas.items() for key in walk_keys(schema, _NAMED)]
    found = [key for key in keys if key.path == whole] or [key for key in keys if key.path == inner]
    found = found or [key for key in keys if key.path.endswith(f".{inner}")]
    if not found:
        sections = [key.rpartition(".")[0] for key in (whole, inner)]
        near = [
            path
            for schema in schemas.values()
            for key in (whole, inner)
            for path in meant(schema, _NAMED, key)
        ]
        near.sort(key=lambda path: path.rpartition(".")[0] not in sections)
        known = sorted({key.path for key in keys if "." not in key.path})
        top = inner.partition(".")[0]
        listed = f"mae-vit config {top} lists its keys" if top in known else f"known: {', '.join(known)}"
        hint = device_hint(inner.rpartition(".")[2]) or (f'did you mean "{near[0]}"?' if near else listed)
        words = asked.replace("_", " ")  # of a meaning: learning_rate
        named = [key for key in keys if asked in key.path.rpartition(".")[2].split("_")]
        said = [key for key in keys if re.search(rf"\b{re.escape(words)}", key.meaning) and not near]
        if parts := sorted({key.path for key in named or said}):
            hint = f"keys with this word: {', '.join(parts)}"
        raise InputError(f'no key "{asked}"; {hint}')
    lines = list[str]()
    for key in _merged(found):
        lines += ["", *(_section(key) if sections_in([kind_of(key.field)]) else _facts(key))]
    return lines[1:]


def _merged(keys: Sequence[Key]) -> list[Key]:
    """Joins keys of equal path, meaning and default, which several branches and jobs share."""
    merged: dict[Any, Key] = {}
    for key in keys:
        same = (key.path, key.meaning, type_in_words(key.field.annotation), default_in_words(key.field))
        one = merged.setdefault(same, key)
        choice = one.choice if key.choice in one.choice.split(" or ") else f"{one.choice} or {key.choice}"
        merged[same] = replace(one, choice=choice, jobs=tuple(dict.fromkeys([*one.jobs, *key.jobs])))
    return list(merged.values())


def _facts(key: Key) -> list[str]:
    facts = {
        "type": type_in_words(key.field.annotation).replace("`", ""),
        "default": default_in_words(key.field).replace("`", ""),
        "meaning": key.meaning.replace("`", ""),
        **({"belongs": f"to {key.choice}"} if key.choice else {}),
        "for": ", ".join(key.jobs),
    }
    lines = [key.path]
    for name, text in facts.items():
        lines += textwrap.wrap(text, _WIDTH, initial_indent=f"  {name:<9}", subsequent_indent=" " * 11)
    return [*lines, *_presets(key)]


def _section(key: Key) -> list[str]:
    """Returns the keys of a section, each with the beginning of its meaning."""
    inner = dict[str, str]()
    for model in sections_in([kind_of(key.field)]):
        known = meanings(model)
        inner |= {name: known.get(name, "a section") for name in model.model_fields}
    width = max(map(len, inner), default=0) + 2
    shown = (textwrap.shorten(text, _WIDTH - width - 2, placeholder=" ...") for text in inner.values())
    return [key.path, *(f"  {name:<{width}}{text}" for name, text in zip(inner, shown, strict=True))]


def _presets(key: Key) -> list[str]:
    """Returns the values that presets give a key, each with some of their names."""
    names: dict[str, list[str]] = {}
    told = key.choice.partition("=")[0]
    for file in preset_paths():
        text = file.read_text(encoding="utf-8")
        *sections, name = key.path.split(".")
        if name not in text:
            continue
        node = value_at(parse_yaml(text, file.name), sections)
        if not isinstance(node, dict) or node.get(name) is None:
            continue
        # Of another branch, unless the preset leaves the branch to its default.
        if not told or told not in node or f"{told}={node[told]}" in key.choice.split(" or "):
            names.setdefault(write_value(node[name]), []).append(file.stem)
    if not names:
        return ["  presets  none sets it"]
    most = sorted(names.items(), key=lambda item: -len(item[1]))
    lines = [
        f"{value}: {', '.join(stems[:_PRESETS])}{f' and {len(stems) - _PRESETS} more' * (len(stems) > _PRESETS)}"
        for value, stems in most[:_VALUES]
    ]
    if rest := len(most) - len(lines):
        lines.append(f"and {count_of(rest, 'other value')}")
    shown = [textwrap.shorten(line, _WIDTH - 11, placeholder=" ...") for line in lines]
    return [f"  presets  {shown[0]}", *(" " * 11 + line for line in shown[1:])]
