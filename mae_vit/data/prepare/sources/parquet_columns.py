"""Which columns of a Parquet file hold images and labels, by the schema's types and the Hub's note on features."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from mae_vit.core.errors import InputError
from mae_vit.core.messages import closest
from mae_vit.data.prepare.listing import shown

_IMAGE_NAMES = ("image", "img", "jpg", "jpeg", "png", "webp", "picture", "photo")
LABEL_NAMES = ("label", "labels", "class", "class_name", "cls", "target", "category")


@dataclass(frozen=True)
class ParquetOptions:
    """What the user says of Parquet files, of data sets of the Hub, and of the fields of shards.

    Attributes:
        image_column: name; None for the one that is there.
        label_column: name; None for the one that is there, if any.
        config_name: of several configurations of a data set of the Hub.
        overwrite: whether splits that exist are replaced, which is else refused before anything is read; None leaves
            that to `prepare`.
    """

    image_column: str | None = None
    label_column: str | None = None
    config_name: str | None = None
    overwrite: bool | None = None


@dataclass(frozen=True)
class Columns:
    """The columns that are read.

    Attributes:
        image: holds {bytes, path}, or bytes.
        label: None without labels.
        names: of the classes that integer labels number, where the file tells them.
        note: what was chosen among several; empty if there was no choice.
        split: of texts that name the split of each row; None without.
    """

    image: str
    label: str | None = None
    names: tuple[str, ...] | None = None
    note: str = ""
    split: str | None = None


def parquet_library() -> tuple[ModuleType, ModuleType]:
    """Imports pyarrow and its reader of Parquet.

    Raises:
        InputError: if it is not installed.
    """
    try:
        import pyarrow  # optional
        import pyarrow.parquet
    except ImportError as error:
        missing = error.name or "pyarrow"
        raise InputError(f'{missing} is not installed: pip install "mae-vit[parquet]"') from None
    return pyarrow, pyarrow.parquet


def choose_columns(
    schema: Any,
    where: str,
    options: ParquetOptions,
    *,
    labels: bool,
    holds_base64: Callable[[str], bool] = lambda name: False,
) -> Columns:
    """Chooses the columns of images and labels.

    Args:
        schema: pyarrow's.
        where: names the file in errors.
        options: the user's choice.
        labels: whether labels are wanted.
        holds_base64: whether a column of texts holds images.

    Raises:
        InputError: if there is no such column, or several could be meant.
    """
    features = _features(schema)
    image, note = _image_column(schema, features, where, options.image_column, holds_base64)
    label = _label_column(schema, features, where, options.label_column) if labels else None
    names = features.get(label, {}).get("names") if label else None
    listed = isinstance(names, list) and all(isinstance(name, str) for name in names)
    split = next(
        (field.name for field in schema if field.name.lower() == "split" and _is_text(field.type)), None
    )
    wanted = (image, label, split)
    others = [field.name for field in schema if field.name not in wanted and _is_label(field.type)]
    if others and labels and label is None:
        note += f"{note and '; '}no labels; columns that are not read: {shown(others)} (--label-column NAME takes one)"
    return Columns(image, label, tuple(names) if listed and names else None, note, split)


def _features(schema: Any) -> dict[str, dict[str, Any]]:
    """What the Hub's libraries note of each column, such as {"_type": "ClassLabel", "names": [...]}."""
    with suppress(KeyError, ValueError, TypeError, AttributeError):
        found = json.loads(schema.metadata[b"huggingface"])["info"]["features"]
        return {name: feature for name, feature in found.items() if isinstance(feature, dict)}
    return {}


def _image_column(
    schema: Any, features: dict[str, Any], where: str, asked: str | None, holds_base64: Callable[[str], bool]
) -> tuple[str, str]:
    usable = {field.name: _image_kind(field.type) for field in schema}

    def is_base64(name: str) -> bool:
        return _is_text(schema.field(name).type) and holds_base64(name)

    if asked is not None:
        _check_there(schema, asked, where, "--image-column")
        if not usable[asked] and not is_base64(asked):
            raise InputError(
                f"{where}: column {asked} is of {schema.field(asked).type}; "
                "images are {bytes, path}, binary or base64"
            )
        return asked, ""
    marked = [
        name for name, kind in usable.items() if kind and features.get(name, {}).get("_type") == "Image"
    ]
    structs, binaries = (
        [name for name, kind in usable.items() if kind == form] for form in ("struct", "binary")
    )
    candidates = marked or structs or binaries or [name for name in schema.names if is_base64(name)]
    if not candidates:
        raise InputError(
            f"{where} has no column of images, which are {{bytes, path}}, binary or base64: it has "
            f"{_listed(schema.names)}; of paths, write them and the labels as a CSV, and give that; "
            "of addresses, download the images first"
        )
    named = [name for name in candidates if name.lower() in _IMAGE_NAMES]
    if len(candidates) == 1 or len(named) == 1:
        chosen = candidates[0] if len(candidates) == 1 else named[0]
        others = [name for name in candidates if name != chosen]
        return (
            chosen,
            f"images are of column {chosen}, not of {_listed(others)} (--image-column)" if others else "",
        )
    raise InputError(
        f"{where} has several columns of images, {_listed(candidates)}: choose by --image-column"
    )


def _label_column(schema: Any, features: dict[str, Any], where: str, asked: str | None) -> str | None:
    usable = [field.name for field in schema if _is_label(field.type)]
    if asked is not None:
        _check_there(schema, asked, where, "--label-column")
        if asked not in usable:
            raise InputError(
                f"{where}: column {asked} is of {schema.field(asked).type}; labels are integers or strings"
            )
        return asked
    for field in schema:
        if field.name.lower() in LABEL_NAMES and parquet_library()[0].types.is_nested(field.type):
            raise InputError(
                f"{where}: column {field.name} holds {field.type}, and one class of each image is read: choose "
                "another by --label-column, or --no-labels"
            )
    marked = [name for name in usable if features.get(name, {}).get("_type") == "ClassLabel"]
    named = [name for name in marked or usable if name.lower() in LABEL_NAMES]
    # fine_label and coarse_label of CIFAR-100, where nothing says which columns are classes.
    candidates = (
        named or marked or [name for name in usable if re.split(r"[_\W]", name.lower())[-1] in LABEL_NAMES]
    )
    if len(candidates) > 1:
        raise InputError(
            f"{where} has several columns of labels, {_listed(candidates)}: choose by --label-column, or --no-labels"
        )
    return candidates[0] if candidates else None


def _image_kind(kind: Any) -> str:
    types = parquet_library()[0].types

    def is_binary(inner: Any) -> bool:
        return bool(types.is_binary(inner) or types.is_large_binary(inner))

    if types.is_struct(kind):
        place = kind.get_field_index("bytes")
        return "struct" if place >= 0 and is_binary(kind.field(place).type) else ""
    return "binary" if is_binary(kind) else ""


def _is_label(kind: Any) -> bool:
    types = parquet_library()[0].types
    inner = kind.value_type if types.is_dictionary(kind) else kind
    numbers = types.is_integer(inner) or types.is_floating(inner) or types.is_boolean(inner)
    return bool(numbers or _is_text(inner))


def _is_text(kind: Any) -> bool:
    types = parquet_library()[0].types
    inner = kind.value_type if types.is_dictionary(kind) else kind
    return bool(types.is_string(inner) or types.is_large_string(inner))


def _check_there(schema: Any, asked: str, where: str, option: str) -> None:
    if asked not in schema.names:
        hint = closest(asked, schema.names) or f"it has {_listed(schema.names)}"
        raise InputError(f"{option} {asked}: {where} has no such column: {hint}")


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "none"
