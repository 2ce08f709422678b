"""Writes docs/config.md from the schema of configs: `python docs/tools/config_reference.py`."""

import inspect
import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel

from mae_vit.comparison.config import CompareConfig
from mae_vit.config.describe import default_in_words, meanings, type_in_words
from mae_vit.config.keys import kind_of, one_of
from mae_vit.finetuning.config.schema import HIDDEN_KEYS, FinetuneConfig
from mae_vit.objectives.pretrain_config import PretrainConfig

OUT = Path(__file__).resolve().parents[1] / "config.md"
_HEAD = """# All keys of a config

Give any key on the command line as `section.key=value`. `null` restores a key's default, unless its meaning
says otherwise. Unknown keys and impossible combinations are errors. In the tables, "required" means that the
config must set the key, and "none" that it need not.
"""
_REFUSED = [f"`{key}`" for key in HIDDEN_KEYS if not key.startswith("finetune.")]
_FINETUNING = f"""Fine-tuning has the keys of pretraining, except for `objective` and those that have no effect here:
{", ".join(_REFUSED[:-1])} and {_REFUSED[-1]}.
The tables list the keys that are new or have other values.
"""
_TOP = "| key | value | default | meaning |\n| --- | --- | --- | --- |"


def render() -> str:
    """Returns the page."""
    tuned = _sections(FinetuneConfig, besides=PretrainConfig, without=HIDDEN_KEYS)
    parts = [_HEAD, "## Pretraining\n", *_sections(PretrainConfig), "## Fine-tuning\n", _FINETUNING, *tuned]
    return "\n".join([*parts, "## Comparing\n", *_sections(CompareConfig)])


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
    known = meanings(model)
    for name, field in model.model_fields.items():
        inner = _models(field.annotation)
        if inner:
            if whole:
                yield from _rows(inner[0], f"{prefix}{name}.")
        elif name in known:
            key = f"{prefix}{name}"
            kind, default = type_in_words(field.annotation), default_in_words(field)
            yield key, f"| `{key}` | {kind} | {default} | {known[name]} |"
        else:
            sys.exit(f"{prefix}{name} has no meaning: add it to the Attributes of {model.__name__}")


def _models(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in get_args(annotation) for model in _models(part)]


if __name__ == "__main__":
    print(OUT, OUT.write_text(render()))
