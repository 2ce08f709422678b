"""Writes docs/config.md: all keys of a config, from the schema.

python docs/tools/config_reference.py
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

# So that a checkout runs without being installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from key_meanings import MEANINGS

from mae_vit.config.keys import branches
from mae_vit.finetuning.comparison.config import CompareConfig
from mae_vit.finetuning.config.schema import HIDDEN_KEYS, FinetuneConfig
from mae_vit.objectives.pretrain_config import PretrainConfig

OUT = Path(__file__).resolve().parents[1] / "config.md"
_HEAD = """# All keys of a config

Give any key on the command line as `section.key=value`. `null` restores a key's default. Unknown keys and impossible
combinations are errors. In the tables, "required" means that the config must set the key, and "none" that it need not.

`python docs/tools/config_reference.py` writes this page from the code.
"""
_REFUSED = [f"`{key}`" for key in HIDDEN_KEYS if not key.startswith("finetune.")]
_FINETUNING = f"""Fine-tuning has the keys of pretraining, except for `objective` and those that have no effect here:
{", ".join(_REFUSED[:-1])} and {_REFUSED[-1]}.
The tables list the keys that are new or have other values.
"""
_TOP = "| key | value | default | meaning |\n| --- | --- | --- | --- |"


def render() -> str:
    """Returns the page."""
    parts = [
        *(_HEAD, "## Pretraining\n", *_sections(PretrainConfig)),
        *(
            "## Fine-tuning\n",
            _FINETUNING,
            *_sections(FinetuneConfig, besides=PretrainConfig, without=HIDDEN_KEYS),
        ),
        *("## Comparing\n", *_sections(CompareConfig)),
    ]
    return "\n".join(parts)


def _sections(
    schema: type[BaseModel], *, besides: type[BaseModel] | None = None, without: Collection[str] = ()
) -> Iterator[str]:
    """A table for each section, of the keys that the section of another schema that it extends does not have alike."""
    others = {name: model for name, _, model in _models_of(besides)} if besides else {}
    for name, tag, model in _models_of(schema):
        extends = name in others and issubclass(model, others[name])
        known = _rows(others[name]) if extends else {}
        rows = [
            row
            for key, row in _rows(model).items()
            if known.get(key) != row and f"{name}.{key}" not in without
        ]
        title = f"`{name}`" + (f", `name: {tag}`" if tag else "")
        if rows:
            yield f"### {title}\n\n{_about(model)}\n\n" + _table(rows, _meanings(name, model))
    alone = [
        _row(name, field) for name, field in schema.model_fields.items() if not _models(field.annotation)
    ]
    if alone:
        yield "### At the top\n\n" + _table(alone, _meanings("", schema))


def _models_of(schema: type[BaseModel]) -> Iterator[tuple[str, str | None, type[BaseModel]]]:
    """The sections by name; where there are several of a name, with the key `name` that chooses among them."""
    for name, field in schema.model_fields.items():
        tags = {model: tag for tag, model in branches(field).items()}
        for model in _models(field.annotation):
            yield name, tags.get(model), model


def _rows(model: type[BaseModel]) -> dict[str, str]:
    rows = {}
    for name, field in model.model_fields.items():
        inner = _models(field.annotation)
        if len(inner) == 1 and not branches(field):
            rows |= {
                f"{name}.{key}": _row(f"{name}.{key}", part) for key, part in inner[0].model_fields.items()
            }
        else:
            rows[name] = _row(name, field)
    return rows


def _row(name: str, field: Any) -> str:
    if field.is_required():
        default = "required"
    elif field.default is PydanticUndefined:
        default = f"`{field.default_factory()}`" if field.default_factory else ""
    else:
        default = "none" if field.default is None else f"`{_text(field.default)}`"
    return f"| `{name}` | {_type(field.annotation)} | {default} |"


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _type(annotation: Any) -> str:
    """A type for people: choices, a number, a list."""
    arguments, origin = get_args(annotation), get_origin(annotation)
    if annotation is type(None):
        return ""
    if origin is not None and getattr(origin, "__name__", "") == "Literal":
        return " or ".join(f"`{_text(one)}`" for one in arguments)
    if arguments and getattr(annotation, "__metadata__", None):
        return _type(arguments[0])
    if origin is list and getattr(get_origin(arguments[0]), "__name__", "") == "Literal":
        return f"list of {_type(arguments[0])}"
    if origin in (list, tuple, dict):
        return {list: "list", tuple: "list", dict: "keys and values"}[origin]
    if arguments:
        return " or ".join(dict.fromkeys(filter(None, map(_type, arguments))))
    names = {
        "int": "integer",
        "float": "number",
        "str": "text",
        "PathText": "path",
        "bool": "`true` or `false`",
    }
    return names.get(getattr(annotation, "__name__", ""), "section")


def _table(rows: list[str], meanings: dict[str, str]) -> str:
    """The rows of keys, each with its meaning. Keys of parts (`mae.mask_ratio`) mean what they mean alone."""
    full = []
    for row in rows:
        key = row.split("`")[1]
        meaning = meanings.get(key) or meanings.get(key.rpartition(".")[2])
        if meaning is None:
            sys.exit(
                f"{key} has no meaning: add it to docs/tools/key_meanings.py, or to its section's Attributes"
            )
        full.append(f"{row} {meaning} |")
    return "\n".join([_TOP, *full]) + "\n"


def _about(model: type[BaseModel]) -> str:
    """The docstring, without its list of attributes."""
    return (inspect.getdoc(model) or "").partition("Attributes:")[0].strip()


def _meanings(section: str, model: type[BaseModel]) -> dict[str, str]:
    """What the keys of a section mean: by the docstring's list of attributes, else by `key_meanings`."""
    listed = (inspect.getdoc(model) or "").partition("Attributes:")[2]
    entries = re.findall(r"^    (\w+): (.*(?:\n        .*)*)", listed, re.MULTILINE)
    return MEANINGS.get(section, {}) | {name: " ".join(text.split()).rstrip(".") for name, text in entries}


def _models(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in get_args(annotation) for model in _models(part)]


if __name__ == "__main__":
    OUT.write_text(render())
    print(OUT)
