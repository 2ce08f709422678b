"""What a run is made of, so that a finished one is known again, and one of other things is not."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from mae_vit.config.overrides import parse_yaml
from mae_vit.core.errors import InputError
from mae_vit.core.urls import is_url, redact_url
from mae_vit.data.index import fingerprint_of
from mae_vit.data.remote.folder import resolve_data_path
from mae_vit.data.shards.dataset_json import file_digest, read_dataset

# Options of a run that name weights: what lies there counts, not the path alone.
WEIGHTS_OPTIONS = ("finetune.teacher", "model.init")
_WEIGHTS = ("model.safetensors", "encoder.safetensors")


def describe_inputs(arguments: tuple[str, ...], config: Path, start: str | None, data: str) -> dict[str, Any]:
    """Describes a run by what its result depends on.

    Args:
        arguments: of its command line, without its config's path.
        config: a YAML file: its values count, not its comments, nor where it lies.
        start: what it begins from, as `--ckpt` takes it.
        data: path of its shards.

    Returns:
        For JSON; None stands for what cannot be read (now).
    """
    return {
        "settings": list(arguments),
        "config": _digest_of_config(config),
        "start": None if start is None else _digest_of_start(start),
        "data": _fingerprints(data),
        **{key: _digest_of_start(path) for key, path in _weights_among(arguments, config)},
    }


def _weights_among(arguments: Sequence[str], config: Path) -> Iterator[tuple[str, str]]:
    """The options that name files with weights, and their values: a config's, unless an argument says otherwise."""
    content = _content_of_config(config)
    given = dict(argument.partition("=")[::2] for argument in arguments)
    for option in WEIGHTS_OPTIONS:
        section, _, key = option.partition(".")
        values = content.get(section) if isinstance(content, dict) else None
        value = values.get(key) if isinstance(values, dict) else None
        if option in given:
            value = json.loads(given[option])
        if isinstance(value, str):
            yield option, value


def difference(recorded: object, now: Mapping[str, Any]) -> str | None:
    """Names what differs between two descriptions; None if nothing that is known does.

    Splits that the data have gained in between make no difference.
    """
    if not isinstance(recorded, dict):  # written before more than settings was told
        return "settings"
    for name, value in now.items():
        before = recorded.get(name)
        if name == "data" and before and value:
            value = {split: value.get(split) for split in before}
        if value != before and (name == "settings" or None not in (value, before)):
            return name
    return None


def changed_settings(recorded: object, now: Mapping[str, Any]) -> str:
    """Says which settings differ between two descriptions, as a message's parenthesis; empty if not known."""
    if not isinstance(recorded, dict):
        return ""
    before, after = _named(recorded["settings"]), _named(now["settings"])
    gone = [one for one in before if one not in after]
    new = [one for one in after if one not in before]
    parts = [f"{when} {' '.join(which)}" for when, which in (("then", gone), ("now", new)) if which]
    return f" ({', '.join(parts)})" if parts else ""


def _named(arguments: Sequence[str]) -> list[str]:
    """Arguments as a message tells them: an option with its value, URLs without what may be secret."""
    words = list(arguments)
    if words and words[0] == "--ckpt":
        words[:2] = [f"--ckpt {redact_url(words[1])}"]
    return [_without_secrets(word) for word in words]


def _without_secrets(setting: str) -> str:
    key, _, value = setting.partition("=")
    url = value.strip('"')
    return f"{key}={redact_url(url)}" if is_url(url) else setting


def _content_of_config(path: Path) -> Any:
    """A config's values; None where it is not there."""
    try:
        return parse_yaml(path.read_text(encoding="utf-8"), str(path))
    except OSError:
        return None


def _digest_of_config(path: Path) -> str | None:
    content = _content_of_config(path)
    if content is None:
        return None
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()


def _digest_of_start(start: str) -> str | None:
    path = Path(start)
    files = [path] if not path.is_dir() else [path / name for name in _WEIGHTS]
    for file in files:
        if file.is_file():
            status = file.stat()
            return _digest_of_file(file, status.st_size, status.st_mtime_ns)
    return None


@lru_cache
def _digest_of_file(path: Path, size: int, changed_ns: int) -> str:
    """A comparison asks for each cell; the file is read once, until it changes."""
    return file_digest(path)


def _fingerprints(data: str) -> dict[str, str] | None:
    try:
        folder = _folder_of_url(data) if is_url(data) else Path(data)
        if folder is None:
            return None
        return {name: fingerprint_of(split) for name, split in read_dataset(folder).splits.items()}
    except InputError:
        return None


@lru_cache
def _folder_of_url(data: str) -> Path | None:
    """A comparison asks for each cell; a URL is asked once, an answer that does not come too."""
    try:
        return resolve_data_path(data).folder
    except InputError:
        return None
