"""The keys that a config's schema knows: lists them, and finds the nearest to an unknown key.

A section may be one of several models that `name` selects, such as an objective. These are its branches.
"""

from __future__ import annotations

import difflib
import textwrap
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from mae_vit.config.section import OneOf, Section
from mae_vit.core.messages import device_hint

# Lowest difflib ratio at which a known key is suggested: in the same section, and in another section.
_CLOSE_BESIDE, _CLOSE_ELSEWHERE, _CONTAINED = 0.5, 0.7, 0.95
_MAX_MEANT = 4
_WIDTH = 100


def one_of(field: FieldInfo) -> OneOf | None:
    """Returns how a field's section is chosen from several; None if it takes one kind of section or none."""
    return next((mark for mark in field.metadata if isinstance(mark, OneOf)), None)


def branches(field: FieldInfo) -> Mapping[str, type[BaseModel]]:
    """Lists a field's models by the names that choose them; empty if the field has no branches."""
    return several.sections if (several := one_of(field)) else {}


def written_path(schema: type[BaseModel], location: Sequence[str | int]) -> list[str]:
    """Returns pydantic's location as keys of the file: drops the parts that name branches and types."""
    path: list[str] = []
    models: list[type[BaseModel]] = [schema]
    tags: Mapping[str, type[BaseModel]] = {}
    named = False  # whether the next part is a free name of a section
    for part in location:
        if part in tags:
            models, tags = [tags[str(part)]], {}
        elif named:
            path.append(str(part))
            named = False
        elif models:
            path.append(str(part))
            field = models[0].model_fields.get(str(part))
            models = field_models(field) if field else []
            tags = branches(field) if field else {}
            named = field is not None and has_named_sections(field)
        elif isinstance(part, int):  # an index of a list
            path.append(str(part))
    return path


def key_paths(schema: type[BaseModel], raw: Any, prefix: str = "") -> Iterator[str]:
    """Yields all keys as `section.key`, also the sections. If a section has branches, `raw` chooses one."""
    for name, field in schema.model_fields.items():
        yield prefix + name
        inner = raw.get(name) if isinstance(raw, dict) else None
        sections = {f"{prefix}{name}.": inner}
        if has_named_sections(field):
            named = inner if isinstance(inner, dict) else {}
            sections = {f"{prefix}{name}.{key}.": section for key, section in named.items()}
        for model in _chosen(field, inner):
            for begin, section in sections.items():
                yield from key_paths(model, section, begin)


def fields_at(schema: type[BaseModel], path: Sequence[str]) -> list[FieldInfo]:
    """Finds the fields at a path, in any branch; empty for an unknown key."""
    models, matching = [schema], []
    for part in path:
        matching = [model.model_fields[part] for model in models if part in model.model_fields]
        models = [model for field in matching for model in field_models(field)]
    return matching


def options_from(schema: type[BaseModel], path: Sequence[str]) -> int | None:
    """Returns the depth where a path enters a mapping of dotted keys (1 for `set.train.epochs`); None if nowhere."""
    models = [schema]
    depth = 0
    while depth < len(path) and models:
        fields = [model.model_fields[path[depth]] for model in models if path[depth] in model.model_fields]
        depth += 1
        mappings = [field.annotation for field in fields if get_origin(field.annotation) is dict]
        if any(get_args(mapping)[1] is Any for mapping in mappings):
            return depth
        # Another mapping: its keys are free names and its values sections.
        depth += bool(mappings)
        models = [model for field in fields for model in field_models(field)]
    return None


def suggest(schema: type[BaseModel], raw: Any, key: str) -> str:
    """Returns a phrase with the whole path of the known key nearest to an unknown one, in any section."""
    if key in key_paths(schema, {}):
        section = key.rpartition(".")[0]
        several = one_of(schema.model_fields[section]) if section in schema.model_fields else None
        return f"it belongs to another {section}.{several.key if several else 'name'}"
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
        near = beside == section
        # A key of the same section gets a bonus, but less than an exact match elsewhere.
        return ratio + 0.15 * near if ratio >= (_CLOSE_BESIDE if near else _CLOSE_ELSEWHERE) else 0.0

    scores = {path: score(path) for path in key_paths(schema, raw)}
    if best := max(scores.values(), default=0.0):
        return [path for path, value in scores.items() if value == best]
    # The same key in a branch that is not chosen. The next error then explains the branch.
    return [path for path in dict.fromkeys(key_paths(schema, {})) if path.rpartition(".")[2] == leaf]


def _typed(raw: Any, key: str) -> str:
    """Returns the whole dotted key that the user wrote; `key` is its unknown beginning."""
    for part in key.split("."):
        raw = raw.get(part) if isinstance(raw, dict) else None
    while isinstance(raw, dict) and raw:
        part, raw = next(iter(raw.items()))
        key += f".{part}"
    return key


def describe_keys(schema: type[BaseModel], *, without: Collection[str] = ()) -> str:
    """Returns the list of keys for `--help`, a few lines per section."""
    fields = schema.model_fields.items()
    rows = [("", " ".join(name for name, field in fields if not field_models(field)))]
    for name, field in fields:
        free = "NAME." if has_named_sections(field) else ""
        heads = branches(field) or dict.fromkeys([""], next(iter(field_models(field)), None))
        several = one_of(field)
        told = several.key if several else ""
        for tag, model in heads.items():
            keys = [
                free + key
                for key in (_leaves(model) if model else ())
                if key != told and f"{name}.{key}" not in without
            ]
            first = name if tag == next(iter(heads)) else ""
            rows.append((first, " ".join([f"{told}={tag}:", *keys] if tag else keys)))
    lines = list[str]()
    for name, text in rows:
        indent = " " * (17 if text.split(":")[0].count("=") else 15)
        first = f"  {name:<13}"
        lines += textwrap.wrap(
            text, _WIDTH, initial_indent=first, subsequent_indent=indent, break_on_hyphens=False
        )
    return "\n".join(lines)


def _leaves(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        inner = field_models(field)
        if not inner:
            yield prefix + name
        for section in inner:
            # Inside a section with branches, leave out the `name` of the inner section: its key names it.
            yield from (key for key in _leaves(section, f"{prefix}{name}.") if key != f"{prefix}{name}.name")


def has_named_sections(field: FieldInfo) -> bool:
    """Returns whether a field is a mapping of free names to sections, as a comparison's `pretrain`."""
    return get_origin(field.annotation) is dict and bool(_models_in(field.annotation))


def _chosen(field: FieldInfo, raw: Any) -> list[type[BaseModel]]:
    several = one_of(field)
    choice = several.choice(raw) if several and isinstance(raw, dict) else None
    if several is not None and choice is not None and choice in several.sections:
        return [several.sections[choice]]
    return field_models(field)


def field_models(field: FieldInfo) -> list[type[BaseModel]]:
    """Lists the models of a field's sections, of all branches; empty for a field that is no section."""
    return [*branches(field).values()] or _models_in(field.annotation)


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in getattr(annotation, "__args__", ()) for model in _models_in(part)]
