"""Digests of what runs read: config files, pretrained weights and data."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from mae_vit.core.errors import InputError
from mae_vit.core.urls import redact_url
from mae_vit.core.user_files import expand_text
from mae_vit.data.data_path import resolve_data_path
from mae_vit.data.shards.dataset_json import file_digest, read_dataset
from mae_vit.data.shards.index_files import fingerprint_of
from mae_vit.finetuning.config.pretrained import read_values
from mae_vit.finetuning.config.recipes import TEST_SPLITS
from mae_vit.training.startup import FREE_KEYS
from mae_vit.weights.names import is_frozen, split_frozen, split_network

# Options that name weights; their content counts, as that of --ckpt does.
_WEIGHTS_OPTIONS = ("finetune.teacher", "model.init")
_WEIGHTS_FILES = ("model.safetensors", "encoder.safetensors")


class Inputs:
    """Digests of files and data, by name.

    A report can be written after an input is gone. Its digest then comes from `protocol.json`.

    Attributes:
        digests: digests requested so far, by name.
    """

    def __init__(self, recorded: Mapping[str, Any]) -> None:
        """Takes the digests of an earlier plan."""
        self._recorded, self.digests = recorded, dict[str, Any]()

    def identity(self, config: Path, overrides: Mapping[str, Any], *, tested: bool) -> dict[str, Any]:
        """Describes what determines a run's result, apart from --ckpt and the runs it needs.

        Args:
            config: its YAML file. Only the values count, not comments or the path.
            overrides: values by dotted key. Keys that a run may change when it resumes do not count.
            tested: whether the run also reads a test split.

        Returns:
            A JSON object.
        """
        content = read_values(config)

        def setting(key: str) -> Any:
            section, _, name = key.partition(".")
            values = content.get(section)
            return overrides.get(key, values.get(name) if isinstance(values, dict) else None)

        splits = self._splits(str(setting("data.path")), setting("data.cache_dir"))
        train = setting("data.split") or "train"
        # Other splits make no difference.
        known = (name for name in TEST_SPLITS if name in splits and name != train)
        test = setting("finetune.test_split") or next(known, "")
        given = {option: setting(option) for option in _WEIGHTS_OPTIONS}
        kept = {
            section: {key: value for key, value in values.items() if f"{section}.{key}" not in FREE_KEYS}
            if isinstance(values, dict)
            else values
            for section, values in content.items()
        }
        return {
            "config": self._keep(f"config {config}", sha1(kept) if kept else None),
            "overrides": {key: value for key, value in overrides.items() if key not in FREE_KEYS},
            "data": [splits.get(train), splits.get(test) if tested else None],
            **{
                key: self.weights(expand_text(value))
                for key, value in given.items()
                if isinstance(value, str)
            },
        }

    def weights(self, name: str) -> str:
        """Returns `NETWORK@DIGEST` of a weights file; for weights without a file (`timm:NAME`), the name."""
        network, path = split_frozen(name) if is_frozen(name) else split_network(name)[::-1]
        path = path or Path(name)
        for file in [path / name for name in _WEIGHTS_FILES] if path.is_dir() else [path]:
            if file.is_file():
                status = file.stat()
                digest = _file_digest(file, status.st_size, status.st_mtime_ns)
                return str(self._keep(f"weights {name}", f"{network or ''}@{digest}"))
        return str(self._keep(f"weights {name}", None) or name)

    def _splits(self, path: str, cache_dir: str | None) -> dict[str, str]:
        """Returns each split's fingerprint; empty if the data were never there."""
        name = f"data {redact_url(path)}"
        if name not in self.digests:
            splits = None
            try:
                dataset = read_dataset(resolve_data_path(path, cache_dir=cache_dir).folder)
                splits = {name: fingerprint_of(split) for name, split in dataset.splits.items()}
            except InputError:  # The data are gone.
                pass
            self._keep(name, splits)
        return self.digests[name] or {}

    def _keep(self, name: str, digest: Any) -> Any:
        self.digests[name] = self._recorded.get(name) if digest is None else digest
        return self.digests[name]


def data_folder(path: str, settings: Mapping[str, Any]) -> Path:
    """Returns the shard folder that runs with these settings read, which may lie in their cache.

    Raises:
        InputError: if the data cannot be opened or prepared.
    """
    return resolve_data_path(settings.get("data.path", path), cache_dir=settings.get("data.cache_dir")).folder


def sha1(identity: Any) -> str:
    """Returns the SHA-1 of plain data."""
    return hashlib.sha1(json.dumps(identity, sort_keys=True, default=str).encode()).hexdigest()


@lru_cache
def _file_digest(path: Path, size: int, changed_ns: int) -> str:
    """Returns the digest of a file, cached until it changes: many runs read the same weights."""
    return file_digest(path)
