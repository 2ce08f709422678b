"""Writes docs/config.md: all keys of a config, from the schema.

python docs/tools/config_reference.py
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

# So that a checkout runs without being installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from mae_vit.config.keys import kind_of, one_of
from mae_vit.config.typed_yaml import PathText
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
_NAMES: dict[Any, str] = {
    **{int: "integer", float: "number", str: "text", bool: "`true` or `false`", PathText: "path"},
    **{list: "list", tuple: "list", dict: "keys and values"},
}
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
    others = {name: model for name, _, model in _field_models(besides)} if besides else {}
    for name, tag, model in _field_models(schema):
        known = dict(_rows(others[name])) if name in others and issubclass(model, others[name]) else {}
        rows = [row for key, row in _rows(model) if known.get(key) != row and f"{name}.{key}" not in without]
        if rows:
            title = f"`{name}`" + (f", `{tag}`" if tag else "")
            about = (inspect.getdoc(model) or "").partition("Attributes:")[0].strip()
            yield "\n".join((f"### {title}\n\n{about}\n\n{_TOP}", *rows)) + "\n"
    alone = [row for name, row in _rows(schema, whole=False)]
    if alone:
        yield "\n".join((f"### At the top\n\n{_TOP}", *alone)) + "\n"


def _field_models(schema: type[BaseModel]) -> Iterator[tuple[str, str | None, type[BaseModel]]]:
    """The sections by name; where there are several of a name, with the key `name` that chooses among them."""
    for name, field in schema.model_fields.items():
        several = one_of([kind_of(field)])
        for tag, model in several.sections.items() if several else ():
            yield name, f"{several.key}: {tag}", model
        if several is None:
            for model in _models(field.annotation):
                yield name, None, model


def _rows(model: type[BaseModel], prefix: str = "", *, whole: bool = True) -> Iterator[tuple[str, str]]:
    """The keys of a section and their rows; if it is `whole`, with those of the sections inside."""
    meanings: dict[str, str] = {}
    for part in reversed(model.__mro__):
        listed = inspect.cleandoc(part.__dict__.get("__doc__") or "").partition("Attributes:")[2]
        entries = re.findall(r"^    (\w+): (.*(?:\n        .*)*)", listed, re.MULTILINE)
        meanings |= {name: " ".join(text.split()).rstrip(".") for name, text in entries}
    for name, field in model.model_fields.items():
        inner = _models(field.annotation)
        if inner:
            if whole:
                yield from _rows(inner[0], f"{prefix}{name}.")
        elif name in meanings:
            key = f"{prefix}{name}"
            yield key, f"| `{key}` | {_type(field.annotation)} | {_default(field)} | {meanings[name]} |"
        else:
            sys.exit(f"{prefix}{name} has no meaning: add it to the Attributes of {model.__name__}")


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    default = field.get_default(call_default_factory=True)
    return "none" if default is None else f"`{_text(default)}`"


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _type(annotation: Any) -> str:
    """A type in words: choices, a number, a list."""
    arguments, origin = get_args(annotation), get_origin(annotation)
    if origin is Literal:
        return " or ".join(f"`{_text(one)}`" for one in arguments)
    if hasattr(annotation, "__metadata__"):
        return _type(arguments[0])
    if origin is list and get_origin(arguments[0]) is Literal:
        return f"list of {_type(arguments[0])}"
    if origin in _NAMES:
        return _NAMES[origin]
    # A union: its parts, without null.
    parts = (_type(one) for one in arguments if one is not type(None))
    return _NAMES.get(annotation) or " or ".join(dict.fromkeys(parts))


def _models(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in get_args(annotation) for model in _models(part)]


if __name__ == "__main__":
    OUT.write_text(render())
    print(OUT)
