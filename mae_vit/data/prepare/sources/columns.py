"""Chooses the columns of images, labels and splits, by the types of a schema and the Hub's metadata."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Collection, Mapping
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
# In order of preference.
_IMAGES = ("images", "binary", "base64")
_LABELS = ("number", "text", "base64")


@dataclass(frozen=True)
class Columns:
    """The columns that are read.

    Attributes:
        image: column of {bytes, path}, bytes, or base64.
        label: column of labels; None without labels.
        split: column of texts that name the split of each row; None without one.
        names: class names for integer labels, if the schema has them.
        unread: other columns that the user may have meant.
    """

    image: str
    label: str | None
    split: str | None
    names: tuple[str, ...] | None
    unread: tuple[str, ...]


def parquet_library() -> ModuleType:
    """Imports pyarrow with its Parquet reader; raises InputError if it is not installed."""
    try:
        import pyarrow.parquet  # optional
    except ImportError as error:
        missing = error.name or "pyarrow"
        raise InputError(f'{missing} is not installed: pip install "mae-vit[parquet]"') from None
    return pyarrow


def choose_columns(schema: Any, first: Mapping[str, Any], where: str, options: SourceOptions) -> Columns:
    """Chooses the columns of images, labels and splits of a pyarrow schema; `first` tells base64 from other texts.

    Raises:
        InputError: if no column fits, or several do.
    """
    kinds = {field.name: _kind(field.type) for field in schema}
    for name, kind in kinds.items():
        if kind == "text" and decode_base64(first.get(name)) is not None:
            kinds[name] = "base64"
    features: dict[str, Any] = {}
    with suppress(KeyError, ValueError, TypeError, AttributeError):
        # The Hub's metadata of each column, such as {"_type": "ClassLabel", "names": [...]}.
        noted = json.loads(schema.metadata[b"huggingface"])["info"]["features"]
        features = {name: feature for name, feature in noted.items() if isinstance(feature, dict)}
    image = _image_column(kinds, features, where, options.image_column)
    if image is None:
        raise InputError(
            f"{where} has no column of images, which are {{bytes, path}}, binary or base64: it has "
            f"{', '.join(kinds) or 'none'}; of paths, write them and the labels as a CSV, and give that"
        )
    label = _label_column(schema, kinds, features, where, options.label_column) if options.labels else None
    names = features.get(label, {}).get("names") if label else None
    split = next((name for name, kind in kinds.items() if name.lower() == "split" and kind == "text"), None)
    others = (*_IMAGES, *_LABELS) if options.labels and label is None else _IMAGES
    unread = (name for name, kind in kinds.items() if kind in others and name not in (image, label, split))
    return Columns(image, label, split, tuple(names) if names else None, tuple(unread))


def _kind(arrow_type: Any) -> str:
    """Returns the kind of a column: images, binary, text, number, nested or other."""
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


def _image_column(
    kinds: Mapping[str, str], features: Mapping[str, Any], where: str, asked: str | None
) -> str | None:
    usable = [name for name, kind in kinds.items() if kind in _IMAGES]
    marked = [name for name in usable if features.get(name, {}).get("_type") == "Image"]
    by_kind = ([name for name in usable if kinds[name] == kind] for kind in _IMAGES)
    candidates = next(filter(None, (marked, *by_kind)), [])
    named = [name for name in candidates if name.lower() in _IMAGE_NAMES]
    return _choose(where, "--image-column", asked, usable, named if len(named) == 1 else candidates)


def _label_column(
    schema: Any, kinds: Mapping[str, str], features: Mapping[str, Any], where: str, asked: str | None
) -> str | None:
    usable = [name for name, kind in kinds.items() if kind in _LABELS]
    for name, kind in kinds.items():
        if asked is None and name.lower() in LABEL_NAMES and kind in ("nested", "images"):
            raise InputError(
                f"{where}: column {name} holds {schema.field(name).type}, and one class of each image is read: "
                "choose another by --label-column, or --no-labels"
            )
    marked = [name for name in usable if features.get(name, {}).get("_type") == "ClassLabel"]
    named = [name for name in marked or usable if name.lower() in LABEL_NAMES]
    # fine_label and coarse_label of CIFAR-100, if no metadata mark the columns of classes.
    last_word = [name for name in usable if re.split(r"[_\W]", name.lower())[-1] in LABEL_NAMES]
    return _choose(where, "--label-column", asked, usable, named or marked or last_word)


def _choose(
    where: str, option: str, asked: str | None, usable: Collection[str], candidates: Collection[str]
) -> str | None:
    """Returns the column that the user names, or else the only candidate; None without one."""
    if asked is not None and asked not in usable:
        hint = closest(asked, usable) or f"there are {', '.join(usable) or 'none'}"
        raise InputError(f"{option} {asked}: {where} has no such column of a type that is read: {hint}")
    if asked is None and len(candidates) > 1:
        raise InputError(
            f"{where}: several columns may be meant, {', '.join(candidates)}: choose by {option}"
        )
    return asked or next(iter(candidates), None)


def unread_note(where: str, columns: Collection[str]) -> list[str]:
    """Returns a note on columns that are not read."""
    said = (
        f"columns of {where} that are not read: {shown(columns)} (--image-column and --label-column choose)"
    )
    return [said] if columns else []


def decode_base64(text: Any) -> bytes | None:
    """Decodes an image from base64 text, also `data:image/png;base64,...`; returns None for other values."""
    with suppress(ValueError, AttributeError):
        data = base64.b64decode(text.rpartition(",")[2])
        return data if image_kind(data[:HEAD_BYTES]) else None
    return None
