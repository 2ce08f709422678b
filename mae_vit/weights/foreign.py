"""Finds third-party weights for any backbone of timm, with timm's facts about them.

"frozen:timm:NAME" takes timm's weights from the Hub, "frozen:timm:NAME@FILE.safetensors" those of a file.
"frozen:FILE.safetensors" takes name and data config from timm's `config.json` beside the file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, get_args

import timm
from timm.data import resolve_data_config
from timm.models import PretrainedCfg, get_pretrained_cfg

from mae_vit.core.bands import RGB8, Bands
from mae_vit.core.errors import FetchUnavailable, InputError
from mae_vit.core.hub import HubName, download
from mae_vit.core.messages import closest, closest_path, error_reason
from mae_vit.data.images.augment import Interpolation
from mae_vit.data.shards.dataset_json import file_digest
from mae_vit.models.sizes import TIMM_PREFIX
from mae_vit.weights.feature_encoder import ImageInput
from mae_vit.weights.names import FROZEN_PREFIX
from mae_vit.weights.start import split_frozen

_WEIGHTS, _CONFIG = "model.safetensors", "config.json"
_FORMS = f'"{FROZEN_PREFIX}{TIMM_PREFIX}NAME" or "{FROZEN_PREFIX}{TIMM_PREFIX}NAME@FILE.safetensors"'
_LONGEST_REASON = 200


@dataclass(frozen=True)
class ForeignWeights:
    """A file of weights, with timm's facts about it.

    Attributes:
        source: weights as the user named them.
        architecture: timm's name, without the tag of the weights.
        file: safetensors file.
        config: timm's config of these weights.
        arguments: more arguments of `timm.create_model`.
        images: the images of its training.
    """

    source: str
    architecture: str
    file: Path
    config: PretrainedCfg
    arguments: Mapping[str, Any]
    images: ImageInput

    @property
    def name(self) -> str:
        """The architecture as in `model.name`."""
        return TIMM_PREFIX + self.architecture

    @property
    def mean(self) -> tuple[float, ...]:
        """Mean of each channel in its training."""
        return tuple(self.images.mean)

    @property
    def std(self) -> tuple[float, ...]:
        """Standard deviation of each channel in its training."""
        return tuple(self.images.std)

    @property
    def bands(self) -> Bands:
        """Bands of timm's weights: photographs."""
        return RGB8

    @cached_property
    def digest(self) -> str:
        """A digest of weights and network."""
        facts = [self.architecture, dict(self.arguments), self.images.interpolation, file_digest(self.file)]
        return hashlib.blake2b(json.dumps(facts).encode(), digest_size=16).hexdigest()


def read_foreign(start: str) -> ForeignWeights:
    """Finds the weights "frozen:..." and timm's facts about them, without building the network.

    Raises:
        InputError: if there are no weights, timm does not know the network, or they cannot be fetched.
        FetchUnavailable: if the Hub cannot be reached.
    """
    name, file = split_frozen(start)
    if file is not None and not (file.is_file() and file.suffix == ".safetensors"):
        raise InputError(f"{start}: no .safetensors file there: {closest_path(file) or f'give {_FORMS}'}")
    if name is None:
        assert file is not None
        return _with_config_beside(start, file)
    architecture, _, tag = name.partition(".")
    if not timm.is_model(architecture):
        raise InputError(f"{start}: timm has no network {architecture!r}: {nearest_timm(architecture)}")
    config = _find_config(name)
    if config is None and file is None:
        tags = [known.partition(".")[2] for known in timm.list_pretrained(f"{architecture}.*")]
        raise InputError(f"{start}: timm has weights {tags} of {architecture}, not {tag!r}: give {_FORMS}")
    config = config or _find_config(architecture) or PretrainedCfg()
    return ForeignWeights(
        start, architecture, file or _fetch(start, name, config), config, {}, _read_images(start, config)
    )


def _find_config(name: str) -> PretrainedCfg | None:
    """Returns timm's config of weights; None if it has none of that name."""
    try:
        return get_pretrained_cfg(name)
    except RuntimeError:
        return None


def _with_config_beside(start: str, file: Path) -> ForeignWeights:
    """Takes architecture and data config from the `config.json` that timm writes beside weights."""
    path = file.with_name(_CONFIG)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        architecture, facts = content["architecture"], content.get("pretrained_cfg", {})
        arguments = content.get("model_args", {})
        known = {field.name for field in fields(PretrainedCfg)} - {"url", "file", "hf_hub_id", "source"}
        if not isinstance(arguments, dict) or not timm.is_model(architecture):
            raise ValueError(f"timm has no network {architecture!r}")
        base = _find_config(architecture) or PretrainedCfg()
        config = replace(base, **{key: value for key, value in facts.items() if key in known})
    except FileNotFoundError:
        named = f"{FROZEN_PREFIX}{TIMM_PREFIX}NAME@{file}"
        raise InputError(
            f"{start} does not say which network it is, and has no {_CONFIG} of timm's beside it: give {named}"
        ) from None
    except OSError as error:
        raise InputError(f"cannot read {path}: {error_reason(error)}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{path} is no {_CONFIG} of timm's: {short_reason(error)}") from None
    return ForeignWeights(start, architecture, file, config, arguments, _read_images(start, config))


def _read_images(start: str, config: PretrainedCfg) -> ImageInput:
    """Reads timm's data config; raises InputError if it is not supported."""
    try:
        data = resolve_data_config(pretrained_cfg=config.to_dict())
        channels, height, width = (int(side) for side in data["input_size"])
        mean, std = (tuple(float(value) for value in data[name]) for name in ("mean", "std"))
        interpolation = data["interpolation"]
        if channels != 3 or len(mean) != 3 or len(std) != 3 or min(height, width, *std) <= 0:
            raise ValueError(f"images of {channels} channels")
        if interpolation not in get_args(Interpolation):
            raise ValueError(f"interpolation {interpolation!r}")
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{start}: its data config is none that is followed here: {short_reason(error)}"
        ) from None
    return ImageInput((height, width), channels, mean, std, interpolation)


def _fetch(start: str, name: str, config: PretrainedCfg) -> Path:
    """Downloads timm's weights into the cache of huggingface_hub, unless they are there."""
    repo = config.hf_hub_id
    if not repo:
        raise InputError(f"{start}: timm has no safetensors of it on the Hub: give {_FORMS}")
    try:
        return download(HubName(repo), [_WEIGHTS])[0]
    except (InputError, FetchUnavailable) as error:
        by_hand = f"`hf download {repo} {_WEIGHTS} --local-dir DIR` where there is a network, then give "
        raise type(error)(
            f"cannot fetch {start}: {error}; or {by_hand}{FROZEN_PREFIX}{TIMM_PREFIX}{name}@DIR/{_WEIGHTS}"
        ) from None


def nearest_timm(name: str) -> str:
    """Returns a hint at timm's name nearest to an unknown one."""
    known = timm.list_models()
    return closest(name, known) or f"it has {len(known)}, such as vit_base_patch16_224"


def short_reason(error: Exception) -> str:
    """Returns an error's message as one line, cut to `_LONGEST_REASON` letters."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= _LONGEST_REASON else f"{text[:_LONGEST_REASON]}..."
