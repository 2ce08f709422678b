"""Which columns hold images, labels and splits, by the types of a schema and the Hub's note on features."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from mae_vit.core.errors import InputError
from mae_vit.core.messages import closest
from mae_vit.core.user_files import HEAD_BYTES, LABEL_NAMES, image_kind
from mae_vit.data.prepare.entries import SourceOptions
from mae_vit.data.prepare.listing import shown

_IMAGE_NAMES = ("image", "img", "jpg", "jpeg", "png", "webp", "picture", "photo")
_LABELS = ("number", "text", "base64")


@dataclass(frozen=True)
class Columns:
    """The columns that are read.

    Attributes:
        image: holds {bytes, path}, bytes, or base64.
        label: None without labels.
        split: of texts that name the split of each row; None without.
        names: of the classes that integer labels number, where the schema tells them.
        notes: what was chosen among several.
    """

    image: str
    label: str | None
    split: str | None
    names: tuple[str, ...] | None
    notes: tuple[str, ...]


def parquet_library() -> ModuleType:
    """Imports pyarrow with its reader of Parquet.

    Raises:
        InputError: if it is not installed.
    """
    try:
        import pyarrow.parquet  # optional
    except ImportError as error:
        missing = error.name or "pyarrow"
        raise InputError(f'{missing} is not installed: pip install "mae-vit[parquet]"') from None
    return pyarrow


def choose_columns(schema: Any, first: Mapping[str, Any], where: str, options: SourceOptions) -> Columns:
    """Chooses the columns of images, labels and splits.

    Args:
        schema: of pyarrow.
        first: the first row, which tells images in base64 from other texts.
        where: names the table in errors.
        options: columns that the user names.

    Raises:
        InputError: if there is no such column, or several could be meant.
    """
    kinds = {field.name: _kind(field.type) for field in schema}
    for name, kind in kinds.items():
        if kind == "text" and decode_base64(first.get(name)) is not None:
            kinds[name] = "base64"
    features = _features(schema)
    image, notes = _image_column(schema, kinds, features, where, options.image_column)
    label = _label_column(schema, kinds, features, where, options.label_column) if options.labels else None
    names = features.get(label, {}).get("names") if label else None
    split = next((name for name, kind in kinds.items() if name.lower() == "split" and kind == "text"), None)
    unread = [name for name, kind in kinds.items() if kind in _LABELS and name not in (image, split)]
    if options.labels and label is None and unread:
        notes.append(f"no labels; columns that are not read: {shown(unread)} (--label-column NAME takes one)")
    return Columns(image, label, split, tuple(names) if names else None, tuple(notes))


def _kind(arrow_type: Any) -> str:
    """What a column may hold: images, binary, text, number, nested or other."""
    types = parquet_library().types
    if types.is_dictionary(arrow_type):
        return _kind(arrow_type.value_type)
    if types.is_struct(arrow_type):
        index = arrow_type.get_field_index("bytes")
        return "images" if index >= 0 and _kind(arrow_type.field(index).type) == "binary" else "nested"
    kinds = {
        "nested": (types.is_nested,),
        "binary": (types.is_binary, types.is_large_binary),
        "text": (types.is_string, types.is_large_string),
        "number": (types.is_integer, types.is_floating, types.is_boolean),
    }
    return next((kind for kind, tests in kinds.items() if any(test(arrow_type) for test in tests)), "other")


def _features(schema: Any) -> dict[str, dict[str, Any]]:
    """What the Hub's libraries note of each column, such as {"_type": "ClassLabel", "names": [...]}."""
    with suppress(KeyError, ValueError, TypeError, AttributeError):
        features = json.loads(schema.metadata[b"huggingface"])["info"]["features"]
        return {name: feature for name, feature in features.items() if isinstance(feature, dict)}
    return {}


def _image_column(
    schema: Any, kinds: Mapping[str, str], features: Mapping[str, Any], where: str, asked: str | None
) -> tuple[str, list[str]]:
    usable = {name: kind for name, kind in kinds.items() if kind in ("images", "binary", "base64")}
    if asked is not None:
        _check_asked(
            schema, asked, usable, where, "--image-column", "images are {bytes, path}, binary or base64"
        )
        return asked, []
    marked = [name for name in usable if features.get(name, {}).get("_type") == "Image"]
    by_kind = (
        [name for name, kind in usable.items() if kind == wanted] for wanted in ("images", "binary", "base64")
    )
    candidates = next(filter(None, (marked, *by_kind)), [])
    named = [name for name in candidates if name.lower() in _IMAGE_NAMES]
    if not candidates:
        raise InputError(
            f"{where} has no column of images, which are {{bytes, path}}, binary or base64: it has "
            f"{_listed(schema.names)}; of paths, write them and the labels as a CSV, and give that; "
            "of addresses, download the images first"
        )
    if len(candidates) > 1 and len(named) != 1:
        raise InputError(
            f"{where} has several columns of images, {_listed(candidates)}: choose by --image-column"
        )
    chosen = candidates[0] if len(candidates) == 1 else named[0]
    others = [name for name in candidates if name != chosen]
    note = f"images are of column {chosen}, not of {_listed(others)} (--image-column)"
    return chosen, [note] if others else []


def _label_column(
    schema: Any, kinds: Mapping[str, str], features: Mapping[str, Any], where: str, asked: str | None
) -> str | None:
    usable = [name for name, kind in kinds.items() if kind in _LABELS]
    if asked is not None:
        _check_asked(schema, asked, usable, where, "--label-column", "labels are integers or strings")
        return asked
    for name, kind in kinds.items():
        if name.lower() in LABEL_NAMES and kind in ("nested", "images"):
            raise InputError(
                f"{where}: column {name} holds {schema.field(name).type}, and one class of each image is read: "
                "choose another by --label-column, or --no-labels"
            )
    marked = [name for name in usable if features.get(name, {}).get("_type") == "ClassLabel"]
    named = [name for name in marked or usable if name.lower() in LABEL_NAMES]
    # fine_label and coarse_label of CIFAR-100, where nothing says which columns are classes.
    last_word = [name for name in usable if re.split(r"[_\W]", name.lower())[-1] in LABEL_NAMES]
    candidates = named or marked or last_word
    if len(candidates) > 1:
        raise InputError(
            f"{where} has several columns of labels, {_listed(candidates)}: choose by --label-column, or --no-labels"
        )
    return candidates[0] if candidates else None


def _check_asked(schema: Any, asked: str, usable: Iterable[str], where: str, option: str, are: str) -> None:
    if asked not in schema.names:
        hint = closest(asked, schema.names) or f"it has {_listed(schema.names)}"
        raise InputError(f"{option} {asked}: {where} has no such column: {hint}")
    if asked not in usable:
        raise InputError(f"{where}: column {asked} is of {schema.field(asked).type}; {are}")


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names) or "none"


def decode_base64(text: Any) -> bytes | None:
    """The image that a text holds as base64, also as `data:image/png;base64,...`; None of anything else."""
    with suppress(ValueError, AttributeError):
        data = base64.b64decode(text.rpartition(",")[2])
        return data if image_kind(data[:HEAD_BYTES]) else None
    return None
