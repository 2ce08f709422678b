"""Reads YAML by the types of a schema: the value of a text key stays as it is written, and paths are expanded."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from copy import copy
from functools import reduce
from typing import Any, Literal, NewType, get_args, get_origin

from pydantic import BaseModel
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from mae_vit.config.keys import Kinds, alternatives, inner_kinds
from mae_vit.core.errors import InputError
from mae_vit.core.messages import error_reason
from mae_vit.core.user_files import expand_text

# The type of keys that name files, folders or weights: their ~ and $NAME are expanded.
PathText = NewType("PathText", str)
# What Python and others call null.
_NO_PATH = ("", "None", "none", "NULL", "Null", "nil", "False", "false")
_TAG = "tag:yaml.org,2002:"
_TEXT = f"{_TAG}str"


def parse_yaml(text: str, where: str, schema: type[BaseModel] | None = None) -> Any:
    """Parses YAML of plain values: nothing in it runs. Without a schema, YAML alone decides what is text.

    Raises:
        InputError: if it is not valid; `where` names the place of the text.
    """
    return _parse(text, where, [schema] if schema else [])


def parse_value(schema: type[BaseModel], key: str, text: str, where: str) -> Any:
    """Reads a value that the command line gives, by the type of its dotted key.

    For a text key the text is the value; in quotes it may also be "null".

    Raises:
        InputError: if the key is not text and the value is not YAML; `where` names the place of the text.
    """
    kinds = _at([schema], key)
    if not _is_text(kinds) or text == "null" or not text:
        return _parse(text, where, kinds)
    if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'":
        with suppress(InputError):  # the name itself has quotes
            text = _parse(text, where, ())
    try:
        return _expanded(text) if _is_path(kinds) else text
    except InputError as error:
        raise InputError(f"{where}: {error}") from None


def write_value(value: Any) -> str:
    """Writes a value as JSON, which `parse_value` and YAML read."""
    # YAML does not know JSON's escapes of letters beyond 16 bits.
    return json.dumps(value, ensure_ascii=False)


def _parse(text: str, where: str, kinds: Kinds) -> Any:
    yaml = YAML(typ="safe", pure=True)
    try:
        node = yaml.compose(text)
        if node is None:
            return None
        node = _retype(node, kinds, set())
        return yaml.constructor.construct_document(node)
    except YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise InputError(f"{where}{line}: not valid YAML: {problem}") from None
    except InputError as error:
        raise InputError(f"{where}: {error}") from None
    except (RecursionError, ValueError, TypeError, KeyError, OverflowError) as error:
        raise InputError(f"{where}: not valid YAML: {error_reason(error)}") from None


def _retype(node: Node, kinds: Kinds, seen: set[int]) -> Node:
    """Turns all keys into text, and the unquoted values (2026-11-26, 007) of text keys."""
    if isinstance(node, ScalarNode):
        node = copy(node)  # aliases of it may stand under keys of other types
        # No key takes a date.
        if (node.tag != f"{_TAG}null" and _is_text(kinds)) or node.tag == f"{_TAG}timestamp":
            node.tag = _TEXT
        if node.tag == _TEXT and _is_path(kinds):
            node.value = _expanded(node.value)
    elif id(node) in seen:  # an alias
        return node
    elif isinstance(node, MappingNode):
        seen.add(id(node))
        pairs = node.value
        for key, _ in pairs:
            if isinstance(key, ScalarNode) and key.tag != f"{_TAG}merge":
                key.tag = _TEXT
        node.value = [(key, _retype(value, _at(kinds, str(key.value)), seen)) for key, value in pairs]
    elif isinstance(node, SequenceNode):
        seen.add(id(node))
        items = [get_args(kind)[0] for kind in alternatives(kinds) if get_origin(kind) is list]
        node.value = [_retype(value, items, seen) for value in node.value]
    return node


def _expanded(text: str) -> str:
    if text in _NO_PATH and not os.path.lexists(text):
        raise InputError(f'"{text}" is not a path; write null for none')
    return expand_text(text)


def _at(kinds: Kinds, key: str) -> Kinds:
    """Returns the types that the value at a dotted key may have; empty if the key is not known."""
    # The free names of a mapping may hold dots themselves.
    return inner_kinds(kinds, key) or reduce(inner_kinds, key.split("."), [*kinds])


def _is_text(kinds: Kinds) -> bool:
    """Returns whether the value of a key is text, or null."""
    members = [kind for kind in alternatives(kinds) if kind is not type(None)]
    return bool(members) and all(
        kind in (str, PathText)
        or (get_origin(kind) is Literal and all(isinstance(choice, str) for choice in get_args(kind)))
        for kind in members
    )


def _is_path(kinds: Kinds) -> bool:
    return PathText in alternatives(kinds)
