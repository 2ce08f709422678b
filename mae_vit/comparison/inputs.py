"""What determines the result of a comparison's run: its config, data and weights, by digest."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from mae_vit.config.plugins import import_plugins, named_plugins, plugin_digests
from mae_vit.core.errors import InputError
from mae_vit.core.urls import redact_url
from mae_vit.core.user_files import expand_text
from mae_vit.data.data_path import resolve_data_path
from mae_vit.data.shards.dataset_json import Dataset, file_digest, read_dataset
from mae_vit.data.shards.index_files import fingerprint_of
from mae_vit.finetuning.config.modes import MODES
from mae_vit.finetuning.config.pretrained import read_values
from mae_vit.models.sizes import TIMM_PREFIX
from mae_vit.training.identity import FREE_KEYS, flatten
from mae_vit.weights.names import split_network, split_timm
from mae_vit.weights.timm_network import is_of_timm

# What the numbers in shards mean is not in the shards.
_BANDS, _MASKS = "the meaning of bands", "the meaning of masks"
# End of the digest of weights of timm's.
_OF_TIMM = " of timm"
_WEIGHTS_FILES = ("model.safetensors", "encoder.safetensors", "pytorch_model.bin")


class Inputs:
    """Reads what determines the results of runs: configs, data and weights.

    A report can be written after an input is gone. Its digest is then the one recorded in `protocol.json`.
    """

    def __init__(self, recorded: Mapping[str, Any]) -> None:
        """Takes the digests of an earlier plan, by name."""
        self._recorded = recorded
        self._dataset = cache(_read_dataset)

    def identity(
        self, config: Path, overrides: Mapping[str, Any], weights: str | None, *, tested: bool
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Describes what determines a run's result, apart from the runs it needs.

        Only the values of `config` count, not its comments or path; keys that a run may change when it resumes do not.
        `weights` are None if it has none, or a run pretrains them; `tested` runs also read a test split. Returns a JSON
        object, and the digests of the inputs by name.
        """
        content, digests = read_values(config), dict[str, Any]()
        settings = {**flatten(content), **overrides}

        def digest(name: str, now: Any) -> Any:
            digests[name] = self._recorded.get(name) if now is None else now
            return digests[name]

        def content_of(weights: str) -> str:
            return str(digest(f"weights {weights}", digest_of_weights(weights)) or weights)

        path, init = str(settings.get("data.path")), settings.get("model.init")
        named = named_plugins({"run": {"plugins": settings.get("run.plugins")}}, ())
        plugins = [digest(f"plug-in {name}", _digest_of_plugin(name)) for name in named]
        train, kept = settings.get("data.split") or "train", _without_free_keys(content)
        masks = MODES[settings.get("finetune.mode") or "finetune"].labels == "mask"
        dataset, where = self._dataset(path, settings.get("data.cache_dir")), redact_url(path)
        facts = digest(f"data {where}", dataset and _describe_data(dataset)) or {}
        # Other splits make no difference.
        beside = dataset and dataset.test_split(train, masks=masks)
        test = digest(f"test split beside {train} of {where}", beside) if tested else None
        meaning = [facts[name] for name in (_BANDS, *([_MASKS] if masks else [])) if name in facts]
        identity = {
            "config": digest(f"config {config}", sha1(kept) if kept else None),
            "overrides": {key: value for key, value in overrides.items() if key not in FREE_KEYS},
            "data": [facts.get(train), facts.get(test), *meaning],
            # Its content counts, as that of --ckpt does.
            **({"model.init": content_of(expand_text(init))} if isinstance(init, str) else {}),
            "weights": weights and content_of(weights),
            **({"plugins": plugins} if plugins else {}),
        }
        return identity, digests

    def are_of_timm(self, weights: str) -> bool:
        """Returns whether weights are of a network of timm's, which brings its own size, pooling and normalization."""
        if weights.startswith(TIMM_PREFIX) or digest_of_weights(weights):
            return is_of_timm(weights)
        return str(self._recorded.get(f"weights {weights}")).endswith(_OF_TIMM)


def _read_dataset(path: str, cache_dir: str | None) -> Dataset | None:
    """Returns the description of data; None if they are gone."""
    try:
        return read_dataset(resolve_data_path(path, cache_dir=cache_dir).folder)
    except InputError:
        return None


def _describe_data(dataset: Dataset) -> dict[str, Any]:
    """Returns each split's fingerprint, and what the numbers in shards mean where that is not always the same."""
    fingerprints = {name: fingerprint_of(split) for name, split in dataset.splits.items()}
    meaning = {_BANDS: dataset.bands.to_entry(), _MASKS: dict(dataset.segmentation or ())}
    return fingerprints | {name: value for name, value in meaning.items() if value}


def _without_free_keys(content: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a config without the keys that a run may change when it resumes."""
    return {
        section: {key: value for key, value in values.items() if f"{section}.{key}" not in FREE_KEYS}
        if isinstance(values, dict)
        else values
        for section, values in content.items()
    }


def digest_of_weights(name: str) -> str | None:
    """Returns `NETWORK@DIGEST` of a weights file; None for weights without a file (`timm:NAME`)."""
    network, path = split_timm(name) if name.startswith(TIMM_PREFIX) else split_network(name)[::-1]
    path = path or Path(name)
    for file in [path / name for name in _WEIGHTS_FILES] if path.is_dir() else [path]:
        if file.is_file():
            status = file.stat()
            digest = _file_digest(file, status.st_size, status.st_mtime_ns)
            return f"{network or ''}@{digest}{_OF_TIMM if is_of_timm(name) else ''}"
    return None


def _digest_of_plugin(name: str) -> str | None:
    """Returns the digest of a plug-in's source; None if it is gone."""
    try:
        import_plugins([name])
    except InputError:
        return None
    return plugin_digests([name])[name]


def sha1(identity: Any) -> str:
    """Returns the SHA-1 of plain data."""
    return hashlib.sha1(json.dumps(identity, sort_keys=True, default=str).encode()).hexdigest()


@lru_cache
def _file_digest(path: Path, size: int, changed_ns: int) -> str:
    """Returns the digest of a file, cached until it changes: many runs read the same weights."""
    return file_digest(path)
