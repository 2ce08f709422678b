"""The keys of a config's schema: their types, and the nearest to an unknown key.

A value may have several types. They are listed as `Kinds`: classes of sections, other annotations, and two marks.
`OneOf` is a section that one of its keys chooses, `KeysOf` a mapping of dotted keys.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from mae_vit.config.section import OneOf, Section
from mae_vit.core.messages import device_hint

Kinds = Sequence[Any]
# Lowest difflib ratio at which a known key is suggested: in the same section, and in another section.
_CLOSE_BESIDE, _CLOSE_ELSEWHERE, _CONTAINED = 0.5, 0.7, 0.95
_MAX_MEANT = 4


@dataclass(frozen=True)
class KeysOf:
    """Marks a mapping whose keys are dotted keys of a schema: `Annotated[dict[str, Any], KeysOf(Config)]`."""

    schema: type[BaseModel]


def kind_of(field: FieldInfo) -> Any:
    """Returns a field's mark if it has one, else its annotation."""
    return next((mark for mark in field.metadata if isinstance(mark, OneOf | KeysOf)), field.annotation)


def alternatives(kinds: Kinds) -> Iterator[Any]:
    """Yields types, with the members of unions in their place."""
    for kind in kinds:
        if get_origin(kind) is Annotated:
            inner, *marks = get_args(kind)
            yield from alternatives([mark for mark in marks if isinstance(mark, OneOf | KeysOf)] or [inner])
        elif get_origin(kind) in (Union, UnionType):
            yield from alternatives(get_args(kind))
        else:
            yield kind


def inner_kinds(kinds: Kinds, name: str) -> list[Any]:
    """Returns the types that the value of a key may have, in any branch; empty if the key is not known."""
    inner: list[Any] = []
    for kind in alternatives(kinds):
        if isinstance(kind, OneOf):
            inner += inner_kinds([*kind.sections.values()], name)
        elif isinstance(kind, KeysOf):
            inner += inner_kinds([kind.schema], name)
        elif get_origin(kind) is dict:
            inner.append(get_args(kind)[1])
        elif isinstance(kind, type) and issubclass(kind, BaseModel) and name in kind.model_fields:
            inner.append(kind_of(kind.model_fields[name]))
    return inner


def kinds_at(schema: type[BaseModel], path: Sequence[str]) -> Kinds:
    """Returns the types that the value at a path may have; empty for an unknown key."""
    return reduce(inner_kinds, path, [schema])


def one_of(kinds: Kinds) -> OneOf | None:
    """Returns how a section is chosen from several; None if the types are no such section."""
    return next((kind for kind in alternatives(kinds) if isinstance(kind, OneOf)), None)


def written_path(schema: type[BaseModel], location: Sequence[str | int]) -> list[str]:
    """Returns pydantic's location as keys of the file: drops the parts that name branches and types."""
    path: list[str] = []
    kinds: Kinds = [schema]
    for part in location:
        several = one_of(kinds)
        if several and part in several.sections:
            kinds = [several.sections[str(part)]]
        elif sections_in(kinds) or isinstance(part, int):
            path.append(str(part))
            kinds = inner_kinds(kinds, str(part))
    return path


def key_paths(schema: type[BaseModel], raw: Any) -> Iterator[str]:
    """Yields all keys as `section.key`, also the sections. If a section has branches, `raw` chooses one."""
    return (path for path, *_ in walk_keys(schema, raw))


def walk_keys(
    schema: type[BaseModel], raw: Any, prefix: str = "", branch: str = ""
) -> Iterator[tuple[str, FieldInfo, type[BaseModel], str]]:
    """Yields path, field, section and branch (`name=CHOICE`) of all keys, also of the sections.

    `raw` has the free names of sections, and chooses branches; where it chooses none, all are walked.
    """
    for name, field in schema.model_fields.items():
        yield prefix + name, field, schema, branch
        kind = kind_of(field)
        inner = raw.get(name) if isinstance(raw, dict) else None
        parts = {f"{prefix}{name}.": inner}
        # A mapping of free names to sections, as a comparison's `pretrain`.
        if get_origin(kind) is dict and sections_in([kind]):
            named = inner if isinstance(inner, dict) else {}
            parts = {f"{prefix}{name}.{key}.": part for key, part in named.items()}
        models = [(branch, model) for model in sections_in([kind])]
        if several := one_of([kind]):
            chosen = several.choice(inner) if isinstance(inner, dict) else None
            walked = [chosen] if chosen is not None and chosen in several.sections else several.sections
            models = [(f"{several.key}={tag}", several.sections[tag]) for tag in walked]
        for inner_branch, model in models:
            for begin, part in parts.items():
                yield from walk_keys(model, part, begin, inner_branch)


def suggest(schema: type[BaseModel], raw: Any, key: str) -> str:
    """Returns a phrase with the whole path of the known key nearest to an unknown one, in any section."""
    typed = _typed(raw, key)
    # A comparison has no `train`, but a `set.train.epochs`.
    key_of_runs = schema.key_of_runs if issubclass(schema, Section) else lambda _: ""
    if hint := device_hint(typed.rpartition(".")[2]):
        return hint.replace("run.device", key_of_runs("device") or "run.device")
    if path := key_of_runs(typed):
        return f'did you mean "{path}"?'
    if paths := meant(schema, raw, key):
        return "did you mean " + " or ".join(f'"{path}"' for path in paths[:_MAX_MEANT]) + "?"
    section = key.rpartition(".")[0]
    beside = [path for path in key_paths(schema, raw) if path.rpartition(".")[0] == section]
    known = sorted(path.rpartition(".")[2] for path in dict.fromkeys(beside))
    return f"known{f' in {section}' if section else ''}: {', '.join(known)}"


def meant(schema: type[BaseModel], raw: Any, key: str) -> list[str]:
    """Returns the known keys nearest to an unknown one, in any section; empty if none is near."""
    section, _, leaf = key.rpartition(".")

    def score(path: str) -> float:
        beside, _, name = path.rpartition(".")
        ratio = difflib.SequenceMatcher(None, leaf, name).ratio()
        if f"_{leaf}_" in f"_{name}_":  # batch_size in effective_batch_size
            ratio = max(ratio, _CONTAINED)
        near = beside == section and bool(section or name.startswith(leaf[:3]))
        # A key of the same section gets a bonus, but less than an exact match elsewhere.
        return ratio + 0.15 * near if ratio >= (_CLOSE_BESIDE if near else _CLOSE_ELSEWHERE) else 0.0

    scores = {path: score(path) for path in key_paths(schema, raw)}
    if best := max(scores.values(), default=0.0):
        return [path for path, value in scores.items() if value == best]
    # The same key in a branch that is not chosen. The next error then explains the branch.
    return [path for path in dict.fromkeys(key_paths(schema, {})) if path.rpartition(".")[2] == leaf]


def value_at(raw: Any, path: Sequence[str]) -> Any:
    """Returns the value at a path in plain data; None if there is none."""
    return reduce(lambda node, key: node.get(key) if isinstance(node, dict) else None, path, raw)


def _typed(raw: Any, key: str) -> str:
    """Returns the whole dotted key that the user wrote; `key` is its unknown beginning."""
    raw = value_at(raw, key.split("."))
    while isinstance(raw, dict) and raw:
        part, raw = next(iter(raw.items()))
        key += f".{part}"
    return key


def sections_in(kinds: Kinds) -> list[type[BaseModel]]:
    """Returns the sections among types, also as items of lists and values of mappings."""
    found: list[type[BaseModel]] = []
    for kind in alternatives(kinds):
        if isinstance(kind, OneOf):
            found += kind.sections.values()
        elif isinstance(kind, type) and issubclass(kind, BaseModel):
            found.append(kind)
        elif not isinstance(kind, KeysOf):
            found += sections_in(get_args(kind))
    return found
