"""Explains what is wrong with a config, one phrase per problem: key, value, nearest valid choice."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel, ValidationError

from mae_vit.config.keys import branches, fields_at, suggest, written_path
from mae_vit.core.messages import closest, nearest

_MAX_SHOWN = 80  # characters of a value
# A section that only one command's configs have -> that command.
_COMMANDS = {
    "objective": "pretrain/run.py (mae-vit pretrain)",
    "finetune": "finetune/run.py (mae-vit finetune)",
    "entries": "finetune/compare.py (mae-vit compare)",
}


class Document(NamedTuple):
    """A config before it is checked.

    Attributes:
        raw: its content as plain data, overrides included.
        path: the file.
        overridden: the dotted keys that the command line set.
    """

    raw: dict[str, Any]
    path: Path
    overridden: Collection[str] = ()


def explain(schema: type[BaseModel], document: Document, error: ValidationError) -> list[str]:
    """Writes each problem as one phrase. Unknown keys come first: a misspelled key often makes another one missing."""
    # pydantic reports one problem for each type of a union; join those of the same value.
    messages: dict[str, list[str]] = {}
    unknown: list[str] = []
    for problem in error.errors():
        path = written_path(schema, problem["loc"])
        if problem["type"] == "extra_forbidden":
            unknown.append(".".join(path))
        else:
            begin, message = _explain(schema, path, problem)
            if problem["type"] == "missing" and path[0] in document.overridden:
                message = f': "{path[0]}" is replaced as a whole; to change a part of it, write {path[0]}.KEY'
            elif (
                problem["type"] == "missing" and len(path) == 3 and (hint := _misnamed_entry(document, path))
            ):
                message = f"; {hint}"
            messages.setdefault(begin, []).append(message)
    # While a section's `name` is wrong, its valid keys are not known.
    misnamed = {begin.partition(".name=")[0] for begin in messages if ".name=" in begin}
    unknown = [key for key in unknown if key.rpartition(".")[0] not in misnamed]
    typed = {key.partition(".")[0] for key in document.overridden}
    for key, command in _COMMANDS.items():
        if key in unknown and key not in typed:
            return [f'a config of another command (it has "{key}"): give it to {command}']
    wrong = [begin + _joined(list(dict.fromkeys(several))) for begin, several in messages.items()]
    return _explain_unknown(schema, document, unknown) + wrong


def _misnamed_entry(document: Document, path: Sequence[str]) -> str:
    """For a missing SECTION.NAME.KEY, the entry that a NAME of the command line may mean; empty if there is none."""
    if not any(key.startswith(".".join(path[:-1]) + ".") for key in document.overridden):
        return ""
    section, name, key = path
    others = document.raw[section].items()
    meant = closest(
        name, [other for other, content in others if isinstance(content, dict) and key in content]
    )
    return meant.replace('"', f'"{section}.', 1)


def _joined(messages: list[str]) -> str:
    """Joins what the types of a union expect by "or", and puts all hints at the end."""
    expected, hints = zip(*(message.partition("; ")[::2] for message in messages), strict=True)
    begin, *more = expected
    whole = " or ".join([begin, *(one.removeprefix("input should be ") for one in more)])
    return "; ".join([whole, *filter(None, hints)])


def _explain_unknown(schema: type[BaseModel], document: Document, keys: Sequence[str]) -> list[str]:
    """Explains unknown keys. Keys of another branch of their section share one phrase."""
    phrases, foreign = [], dict[str, list[str]]()
    for key in keys:
        section, _, name = key.rpartition(".")
        if any(name in model.model_fields for model in _branches_at(schema, section).values()):
            foreign.setdefault(section, []).append(name)
        else:
            phrases.append(f'unknown key "{key}": {suggest(schema, document.raw, key)}')
    return [_explain_foreign(schema, document, *item) for item in foreign.items()] + phrases


def _explain_foreign(schema: type[BaseModel], document: Document, section: str, names: list[str]) -> str:
    """Explains options that belong to another `name` of their section. The command line may have changed the name."""
    models = _branches_at(schema, section)
    node: Any = document.raw
    for part in section.split("."):
        node = node[part]
    chosen = node["name"]
    owners = [tag for tag, model in models.items() if set(names) <= set(model.model_fields)] or [
        tag for tag, model in models.items() if set(names) & set(model.model_fields)
    ]
    # If one objective derives from another and both have the options, name only the base.
    owners = [
        tag
        for tag in owners
        if not any(issubclass(models[tag], models[other]) for other in owners if other != tag)
    ]
    belong = f"{'belongs' if len(names) == 1 else 'belong'} to {section} " + " or ".join(
        f'"{tag}"' for tag in owners
    )
    left = [name for name in names if f"{section}.{name}" not in document.overridden]
    if left == names and f"{section}.name" in document.overridden:
        fitting = sorted(document.path.parent.glob(f"{chosen}_*{document.path.suffix}"))
        where = (
            fitting[0] if len(fitting) == 1 else f"{document.path.parent}/{chosen}_*{document.path.suffix}"
        )
        begin = f"use a config of {chosen} ({where}) or " if fitting else ""
        return (
            f"{section}.name={chosen}: {', '.join(names)} of {document.path.name} {belong}: "
            f"{begin}unset {'it' if len(names) == 1 else 'them'} "
            f"({section}.{names[0]}=null{' ...' if len(names) > 1 else ''})"
        )
    options = ", ".join(name for name in models[chosen].model_fields if name != "name")
    return f'{", ".join(f"{section}.{name}" for name in names)} {belong}; options of "{chosen}": {options}'


def _branches_at(schema: type[BaseModel], section: str) -> dict[str, type[BaseModel]]:
    fields = fields_at(schema, section.split("."))
    return branches(fields[0]) if fields else {}


def _explain(schema: type[BaseModel], path: Sequence[str], problem: Any) -> tuple[str, str]:
    """Returns the start of a phrase (key and value), and what is wrong with the value."""
    kind, key, value = problem["type"], ".".join(path), problem["input"]
    if kind == "missing":
        return f'"{key}" is missing', ""
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        tags = branches(fields_at(schema, path)[0])
        tag = value.get("name") if isinstance(value, dict) else None
        if tag is None:
            return f'"{key}.name" is missing: ', f"one of {', '.join(sorted(tags))}"
        shown = f'"{tag}"' if len(str(tag)) <= _MAX_SHOWN else show(tag)
        return f"{key}.name={shown}: ", nearest(str(tag), tags)
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        names = [name for field in fields_at(schema, path) for name in _keys_of(field.annotation)]
        example = f", e.g. {key}.{names[0]}=..." if names else ""
        return f"{key}={show(value)}: ", f"this is a section: give its keys{example}"
    begin = f"{key}={show(value)}: "
    if kind == "value_error":
        message = str(problem["ctx"]["error"])
        whole = isinstance(value, (dict, BaseModel))  # a section's own check, whose message names the keys
        return (f"{key}: " if key else "") if whole else begin, message
    if kind == "bool_type":
        return begin, "true or false"
    choices = problem.get("ctx", {}).get("expected")
    hint = ""
    if isinstance(value, str) and isinstance(choices, str):
        hint = closest(value, choices.replace(" or ", ", ").replace("'", "").split(", "))
    return begin, problem["msg"][:1].lower() + problem["msg"][1:] + (f"; {hint}" if hint else "")


def _keys_of(annotation: Any) -> list[str]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return list(annotation.model_fields)
    return [name for part in getattr(annotation, "__args__", ()) for name in _keys_of(part)][:1]


def show(value: Any) -> str:
    """Writes a value as in YAML, shortened to `_MAX_SHOWN` characters."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{type(value).__name__} of {len(text)} characters"
