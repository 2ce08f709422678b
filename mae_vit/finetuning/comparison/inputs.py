"""Describes the inputs of a run, so that a comparison reuses a finished run only if its inputs are the same."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from mae_vit.config.load import load_config, read_run_config
from mae_vit.config.typed_yaml import parse_yaml
from mae_vit.core.errors import InputError
from mae_vit.core.urls import is_url, redact_url
from mae_vit.core.user_files import expand_text, read_text
from mae_vit.data.channels import set_channels
from mae_vit.data.data_path import resolve_data_path
from mae_vit.data.shards.dataset_json import file_digest, read_dataset
from mae_vit.data.shards.index_files import fingerprint_of
from mae_vit.finetuning.comparison.config import CompareConfig
from mae_vit.objectives.pretrain_config import PretrainConfig
from mae_vit.training.checkpoints.format import list_checkpoints, step_of
from mae_vit.training.checkpoints.resume import describe_differences, run_identity
from mae_vit.training.outputs.run_folder import RunFolder
from mae_vit.weights.names import is_frozen
from mae_vit.weights.start import split_frozen, split_network

# Options that name weights. The content of the file counts, not only its path.
WEIGHTS_OPTIONS = ("finetune.teacher", "model.init")
_WEIGHTS = ("model.safetensors", "encoder.safetensors")


def describe_inputs(arguments: tuple[str, ...], config: Path, start: str | None, data: str) -> dict[str, Any]:
    """Describes the inputs on which the result of a run depends.

    Args:
        arguments: arguments of its command line, without the config's path.
        config: its YAML file. Only the values count, not comments or the place of the file.
        start: its pretrained weights, as `--ckpt` takes them.
        data: path or URL of its shards.

    Returns:
        A JSON object. A value is None if the input cannot be read now.
    """
    return {
        "settings": list(arguments),
        "config": _digest_of_config(config),
        "start": None if start is None else _digest_of_start(start),
        "data": _fingerprints(data, _cache_among(arguments)),
        **{key: _digest_of_start(path) for key, path in _weights_among(arguments, config)},
    }


def other_pretraining(folder: Path, config: Path, arguments: Sequence[str]) -> str:
    """Says how the pretraining run in a folder differs from one that is to run there.

    Args:
        folder: of the run; it may hold nothing yet.
        config: the config file of the one that is to run there.
        arguments: its overrides.

    Returns:
        The keys that differ, with both values; empty if the run can resume, or begin.
    """
    begun = any(map(step_of, list_checkpoints(folder / "checkpoints")))
    if not begun and RunFolder(folder).read_status() != "done":
        return ""
    now = load_config(PretrainConfig, config, arguments, overrides_from="set")
    try:
        before = PretrainConfig.model_validate(read_run_config(folder))
    except (InputError, ValidationError):
        return "it is of another command, or of another version"
    channels = before.model.in_chans
    if (
        now.model.in_chans is None and channels is not None
    ):  # then they are the data's, which the run compares
        now = set_channels(now, channels)
    return describe_differences(run_identity(before, derived={}).values, run_identity(now, derived={}))


def _weights_among(arguments: Sequence[str], config: Path) -> Iterator[tuple[str, str]]:
    """Yields the options that name weights, with their values. An argument wins over the config."""
    content = _content_of_config(config)
    given = dict(argument.partition("=")[::2] for argument in arguments)
    for option in WEIGHTS_OPTIONS:
        section, _, key = option.partition(".")
        values = content.get(section) if isinstance(content, dict) else None
        value = values.get(key) if isinstance(values, dict) else None
        if option in given:
            value = json.loads(given[option])
        if isinstance(value, str):
            yield option, expand_text(value)


def difference(recorded: object, now: Mapping[str, Any]) -> str | None:
    """Returns the first input that differs between two descriptions; None if no known value differs.

    New splits in the data do not count as a difference.
    """
    if not isinstance(recorded, dict):  # an older version recorded only the settings
        return "settings"
    for name, value in now.items():
        before = recorded.get(name)
        if name == "data" and before and value:
            value = {split: value.get(split) for split in before}
        if value != before and (name == "settings" or None not in (value, before)):
            return name
    return None


def changed_settings(recorded: object, now: Mapping[str, Any]) -> str:
    """Returns a parenthesis that lists the settings that differ between two descriptions; empty if unknown."""
    if not isinstance(recorded, dict):
        return ""
    before, after = _named(recorded["settings"]), _named(now["settings"])
    gone = [one for one in before if one not in after]
    new = [one for one in after if one not in before]
    parts = [f"{when} {' '.join(which)}" for when, which in (("then", gone), ("now", new)) if which]
    return f" ({', '.join(parts)})" if parts else ""


def _named(arguments: Sequence[str]) -> list[str]:
    """Returns arguments for a message: each option with its value, URLs without secrets."""
    words = list(arguments)
    if words and words[0] == "--ckpt":
        words[:2] = [f"--ckpt {redact_url(words[1])}"]
    return [_without_secrets(word) for word in words]


def _without_secrets(setting: str) -> str:
    key, _, value = setting.partition("=")
    url = value.strip('"')
    return f"{key}={redact_url(url)}" if is_url(url) else setting


def _content_of_config(path: Path) -> Any:
    """Returns a config's values; None if the file does not exist."""
    try:
        return parse_yaml(read_text(path), str(path))
    except OSError:
        return None


def _digest_of_config(path: Path) -> str | None:
    content = _content_of_config(path)
    if content is None:
        return None
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()


def _digest_of_start(start: str) -> str | None:
    path = (split_frozen(start)[1] or Path(start)) if is_frozen(start) else split_network(start)[0]
    files = [path] if not path.is_dir() else [path / name for name in _WEIGHTS]
    for file in files:
        if file.is_file():
            status = file.stat()
            return _digest_of_file(file, status.st_size, status.st_mtime_ns)
    return None


@lru_cache
def _digest_of_file(path: Path, size: int, changed_ns: int) -> str:
    """Returns the digest of a file. It is cached until the file changes, because every cell asks for it."""
    return file_digest(path)


def _cache_among(arguments: Sequence[str]) -> str | None:
    """Returns the cache folder that a run's arguments name, where its data are prepared or fetched."""
    given = [text.partition("=")[2] for text in arguments if text.startswith("data.cache_dir=")]
    value = json.loads(given[-1]) if given else None
    return None if value is None else expand_text(value)


def data_folder(config: CompareConfig, settings: Mapping[str, Any]) -> Path:
    """Returns the folder of shards that runs with these settings read, in their own cache where it is prepared.

    Raises:
        InputError: if it cannot be had.
    """
    path = settings.get("data.path", config.data.path)
    return resolve_data_path(path, cache_dir=settings.get("data.cache_dir")).folder


def _fingerprints(data: str, cache_dir: str | None) -> dict[str, str] | None:
    try:
        folder = _folder_of(data, cache_dir)
        if folder is None:
            return None
        return {name: fingerprint_of(split) for name, split in read_dataset(folder).splits.items()}
    except InputError:
        return None


@lru_cache
def _folder_of(data: str, cache_dir: str | None) -> Path | None:
    """Returns the folder of shards of a data path; None if it cannot be had.

    Both results are cached, because every cell asks for it.
    """
    try:
        return resolve_data_path(data, cache_dir=cache_dir).folder
    except InputError:
        return None
