"""Explains what is wrong with a config, one phrase per problem: key, value, nearest valid choice."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel, ValidationError

from mae_vit.config.keys import alternatives, key_paths, kinds_at, one_of, suggest, value_at, written_path
from mae_vit.core.messages import closest, nearest

_MAX_SHOWN = 80  # characters of a value
# A section that only one command's configs have -> that command.
_COMMANDS = {"objective": "pretrain", "finetune": "finetune", "entries": "compare"}


class Document(NamedTuple):
    """A config before it is checked: schema, content with overrides, the file, and the dotted keys of overrides."""

    schema: type[BaseModel]
    raw: dict[str, Any]
    path: Path
    overridden: Collection[str] = ()


def explain(document: Document, error: ValidationError) -> list[str]:
    """Writes each problem as a phrase, unknown keys first: a misspelled key often makes another one missing."""
    # pydantic reports one problem for each type of a union; join those of the same value.
    messages: dict[str, list[str]] = {}
    unknown: list[str] = []
    for problem in error.errors():
        path = written_path(document.schema, problem["loc"])
        if problem["type"] == "extra_forbidden":
            if "." in path[-1]:
                key = ".".join(path)
                inside = ": {".join(key.split(".")) + ": VALUE" + "}" * key.count(".")
                call = f'in Python changes={{"{key}": VALUE}}'
                return [f'"{key}" is not a section; write {inside}, or override it with {key}=VALUE ({call})']
            unknown.append(".".join(path))
            continue
        begin, message = _explain(document, path, problem)
        if problem["type"] == "missing":
            message = _why_missing(document, path)
        messages.setdefault(begin, []).append(message)
    # While a section's `name` is wrong, its valid keys are not known.
    misnamed = {begin.partition(".name=")[0] for begin in messages if ".name=" in begin}
    unknown = [key for key in unknown if key.rpartition(".")[0] not in misnamed]
    overridden = {key.partition(".")[0] for key in document.overridden}
    for key, command in _COMMANDS.items():
        if key in unknown and key not in overridden:
            return [f'this is a config for another command (it has "{key}"); give it to mae-vit {command}']
    wrong = [begin + _joined(list(dict.fromkeys(several))) for begin, several in messages.items()]
    return [_explain_unknown(document, key) for key in unknown] + wrong


def _why_missing(document: Document, path: Sequence[str]) -> str:
    """Says how the command line made a key missing; empty if it did not."""
    if path[0] in document.overridden:
        return f'; the override replaces all of "{path[0]}", so write {path[0]}.KEY=VALUE to change a part'
    if len(path) == 3 and any(key.startswith(".".join(path[:-1]) + ".") for key in document.overridden):
        # SECTION.NAME.KEY: NAME may be a misspelling of a name in the file.
        section, name, key = path
        contents = document.raw[section].items()
        if hint := closest(
            name, [n for n, content in contents if isinstance(content, dict) and key in content]
        ):
            return "; " + hint.replace('"', f'"{section}.', 1)
    return ""


def _joined(messages: list[str]) -> str:
    """Joins what the types of a union expect by "or", and puts all hints at the end."""
    expected, hints = zip(*(message.partition("; ")[::2] for message in messages), strict=True)
    begin, *more = expected
    whole = " or ".join([begin, *(text.removeprefix("input should be ") for text in more)])
    return "; ".join([whole, *filter(None, dict.fromkeys(hints))])


def _explain_unknown(document: Document, key: str) -> str:
    section, _, name = key.rpartition(".")
    several = one_of(kinds_at(document.schema, section.split(".")))
    models = several.sections if several else {}
    owners = " or ".join(f'"{tag}"' for tag, model in models.items() if name in model.model_fields)
    if not owners:
        return f'unknown key "{key}": {suggest(document.schema, document.raw, key)}'
    chosen = str(several.choice(value_at(document.raw, section.split(".")))) if several else ""
    options = ", ".join(option for option in models[chosen].model_fields if option != "name")
    return f'{key} belongs to {section} {owners}; options of "{chosen}": {options}'


def _explain(document: Document, path: Sequence[str], problem: Any) -> tuple[str, str]:
    """Returns the start of a phrase (key and value), and what is wrong with the value."""
    kind, key, value = problem["type"], ".".join(path), problem["input"]
    if kind == "missing":
        return f'"{key}" is missing', ""
    if kind in ("union_tag_invalid", "union_tag_not_found") and isinstance(value, dict):
        several = one_of(kinds_at(document.schema, path))
        assert several is not None
        told, tags = several.key, several.sections
        tag = value.get(told)
        if tag is None:
            return f'"{key}.{told}" is missing; give ', f"one of {', '.join(sorted(tags))}"
        shown = f'"{tag}"' if len(str(tag)) <= _MAX_SHOWN else show(tag)
        return f"{key}.{told}={shown}: ", nearest(str(tag), tags)
    begin = f"{key}={show(value)}: "
    if kind.startswith(("model_", "dict_", "union_tag_")):
        inside = (known for known in key_paths(document.schema, {}) if known.startswith(f"{key}."))
        example = f", e.g. {first}=..." if (first := next(inside, None)) else ""
        return begin, f"this is a section: give its keys{example}"
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
    if value in ("None", "none", "nil"):
        nullable = type(None) in alternatives(kinds_at(document.schema, path))
        hint = hint or ("write null for none" if nullable else "")
    elif kind in ("list_type", "tuple_type") and isinstance(value, str | int | float):
        sides = re.sub(r"^(\d+) ?x ?(\d+)$", r"\1,\2", str(value))  # 64x96
        hint = f"write a list as [{sides.strip('()[] ')}]"
    return begin, problem["msg"][:1].lower() + problem["msg"][1:] + (f"; {hint}" if hint else "")


def show(value: Any) -> str:
    """Writes a value as in YAML, shortened to `_MAX_SHOWN` characters."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{type(value).__name__} of {len(text)} characters"
