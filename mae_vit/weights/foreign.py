"""Third-party weights for any backbone of timm, unchanged, with timm's facts about them and their own pooling.

"frozen:timm:NAME" takes timm's weights from the Hub, "frozen:timm:NAME@FILE.safetensors" those of a file.
"frozen:FILE" takes name and data config from timm's `config.json` beside the file, "frozen:FOLDER" both from a folder.

Shapes: B batch, C channels, H W pixels, D width of a feature, D_map width of a patch's token.
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
import torch
from timm.data import resolve_data_config
from timm.models import PretrainedCfg, get_pretrained_cfg
from torch import Tensor, nn

from mae_vit.core.bands import RGB8, Bands
from mae_vit.core.errors import FetchUnavailable, InputError
from mae_vit.core.hub import HubName, download
from mae_vit.core.messages import closest, closest_path, error_reason
from mae_vit.data.images.augment import Interpolation
from mae_vit.data.shards.dataset_json import file_digest
from mae_vit.models.sizes import TIMM_PREFIX
from mae_vit.weights.containers import read_content
from mae_vit.weights.feature_encoder import FeatureEncoder, ImageInput
from mae_vit.weights.names import FOREIGN_ORIGIN, FROZEN_PREFIX, split_frozen
from mae_vit.weights.unwrap import check_values, named_tensors

_WEIGHTS, _CONFIG = "model.safetensors", "config.json"
# Files of timm's in a folder.
_IN_FOLDER = (_WEIGHTS, "pytorch_model.bin")
_FORMS = f'"{FROZEN_PREFIX}{TIMM_PREFIX}NAME" or "{FROZEN_PREFIX}{TIMM_PREFIX}NAME@FILE.safetensors"'
_LONGEST_REASON = 200
# Arguments of timm's `create_model` that this module sets.
_GIVEN = ("num_classes", "pretrained", "pretrained_cfg", "pretrained_cfg_overlay")


@dataclass(frozen=True)
class ForeignWeights:
    """A file of weights, with timm's facts about it.

    Attributes:
        source: weights as the user named them.
        architecture: timm's name, without the tag of the weights.
        file: file of weights, by timm's names.
        config: timm's config of these weights.
        arguments: more arguments of `timm.create_model`.
        images: the images of its training.
        bands: meaning of the raw values: photographs.
    """

    source: str
    architecture: str
    file: Path
    config: PretrainedCfg
    arguments: Mapping[str, Any]
    images: ImageInput
    bands: Bands = RGB8

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

    @cached_property
    def digest(self) -> str:
        """A digest of weights and network."""
        facts = [self.architecture, dict(self.arguments), self.images.interpolation, file_digest(self.file)]
        return hashlib.blake2b(json.dumps(facts).encode(), digest_size=16).hexdigest()

    def create(self, img_size: tuple[int, int], **options: Any) -> Any:
        """Builds the network without a head, by `timm.create_model`."""
        options |= {name: value for name, value in self.arguments.items() if name not in _GIVEN}
        if self.config.fixed_input_size:
            options["img_size"] = img_size
        return timm.create_model(self.architecture, num_classes=0, **options)


def read_foreign(source: str) -> ForeignWeights:
    """Finds the weights "frozen:..." and timm's facts about them, without building the network.

    Raises InputError if there are no weights, timm does not know the network, or they cannot be fetched. Raises
    FetchUnavailable if the Hub cannot be reached.
    """
    name, file = split_frozen(source)
    if file is not None and file.is_dir():
        file = next((each for each in map(file.joinpath, _IN_FOLDER) if each.is_file()), file)
    if file is not None and not file.is_file():
        hint = "" if file.exists() else closest_path(file)
        raise InputError(f"{source}: there is no file of weights; {hint or f'give {_FORMS}'}")
    if name is None:
        assert file is not None
        return _with_config_beside(source, file)
    architecture, _, tag = name.partition(".")
    if not timm.is_model(architecture):
        raise InputError(f"{source}: timm has no network {architecture!r}; {nearest_timm(architecture)}")
    config = _find_config(name)
    if config is None and file is None:
        tags = [known.partition(".")[2] for known in timm.list_pretrained(f"{architecture}.*")]
        raise InputError(f"{source}: timm has no weights {tag} of {architecture}; known: {', '.join(tags)}")
    config = config or _find_config(architecture) or PretrainedCfg()
    return ForeignWeights(
        source, architecture, file or _fetch(source, name, config), config, {}, _read_images(source, config)
    )


def _find_config(name: str) -> PretrainedCfg | None:
    """Returns timm's config of weights; None if it has none of that name."""
    try:
        return get_pretrained_cfg(name)
    except RuntimeError:
        return None


def _with_config_beside(source: str, file: Path) -> ForeignWeights:
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
            f"{source} does not say its network; put timm's {_CONFIG} next to it, or give {named}"
        ) from None
    except OSError as error:
        raise InputError(f"cannot read {path}: {error_reason(error)}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{path} is not a {_CONFIG} of timm ({_short(error)}); download it again") from None
    return ForeignWeights(source, architecture, file, config, arguments, _read_images(source, config))


def _read_images(source: str, config: PretrainedCfg) -> ImageInput:
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
        raise InputError(f"{source}: its data config is not supported ({_short(error)})") from None
    return ImageInput((height, width), channels, mean, std, interpolation)


def _fetch(source: str, name: str, config: PretrainedCfg) -> Path:
    """Downloads timm's weights into the cache of huggingface_hub, unless they are there."""
    repo = config.hf_hub_id
    if not repo:
        raise InputError(f"{source}: timm has no safetensors of it on the Hub; give {_FORMS}")
    try:
        return download(HubName(repo), [_WEIGHTS])[0]
    except (InputError, FetchUnavailable) as error:
        by_hand = f"run `hf download {repo} {_WEIGHTS} --local-dir DIR` on a machine with network, then give "
        raise type(error)(
            f"cannot fetch {source} ({error}); {by_hand}{FROZEN_PREFIX}{TIMM_PREFIX}{name}@DIR/{_WEIGHTS}"
        ) from None


def nearest_timm(name: str) -> str:
    """Returns a hint at timm's name nearest to an unknown one."""
    known = timm.list_models()
    return closest(name, known) or f"it has {len(known)}, such as vit_base_patch16_224"


def _short(error: Exception) -> str:
    """Returns an error's message as one line."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= _LONGEST_REASON else f"{text[:_LONGEST_REASON]}..."


class ForeignEncoder(FeatureEncoder):
    """A backbone of timm without a head, with its own pooling, in evaluation mode."""

    origin = FOREIGN_ORIGIN
    network: Any

    def __init__(self, network: Any, images: ImageInput, weights: ForeignWeights) -> None:
        """Wraps a model whose weights are already loaded, and encodes a black image as a check.

        Raises InputError if the network does not take such images, or gives no vector.
        """
        super().__init__(images)
        self.network, self.weights = network, weights
        self.eval().requires_grad_(False)
        height, width = images.img_size
        size = f"{weights.name} does not accept images of {height}x{width} px"
        patch = getattr(getattr(network, "patch_embed", None), "patch_size", None) or 1
        rows, columns = (patch, patch) if isinstance(patch, int) else patch
        # Some of timm's networks silently drop an incomplete last patch.
        if images.img_size != weights.images.img_size and (height % rows or width % columns):
            raise InputError(f"{size}; its patches have {rows}x{columns} px")
        try:
            _, self.num_features = self.features(torch.zeros(1, images.in_chans, height, width)).shape
        except (RuntimeError, AssertionError, ValueError) as error:
            asked = "; leave img_size out" if images.img_size != weights.images.img_size else ""
            raise InputError(f"{size} ({_short(error)}){asked}") from None

    def features(self, images: Tensor) -> Tensor:
        """Encodes and pools normalized images as timm does: (B, C, H, W) -> (B, D)."""
        return self.network(images)

    def patch_map(self, images: Tensor) -> Tensor:
        """Returns the last feature map, normed: (B, C, H, W) -> (B, D_map, rows, columns).

        Raises InputError if timm gives none for this network.
        """
        if not hasattr(self.network, "forward_intermediates"):
            raise InputError(f"timm has no map of features for {self.weights.name}")
        try:
            maps: Tensor = self.network.forward_intermediates(
                images, indices=1, norm=True, output_fmt="NCHW", intermediates_only=True
            )[-1]
        except AssertionError as error:  # for example Hiera, which cannot norm its maps
            raise InputError(f"timm has no map of features for {self.weights.name} ({error})") from None
        # A network that pools the mean may have its norm after the mean: here it norms each token.
        if isinstance(getattr(self.network, "norm", None), nn.Identity) and hasattr(self.network, "fc_norm"):
            maps = self.network.fc_norm(maps.movedim(1, -1)).movedim(-1, 1)
        return maps

    def description(self) -> dict[str, Any]:
        """Returns the facts, as JSON, that determine the features: source, digest, sizes, normalization."""
        pool = getattr(self.network, "global_pool", None)
        return {
            "start": self.weights.source,
            "digest": self.weights.digest,
            "origin": self.origin,
            "network": self.weights.name,
            "pool": pool if isinstance(pool, str) else "timm's",
            **super().description(),
            "interpolation": self.input.interpolation,
        }


def open_foreign(weights: ForeignWeights, images: ImageInput) -> ForeignEncoder:
    """Builds the network for images of a size, and loads all weights except the head.

    Raises InputError if the weights do not match the network, or it does not take such a size.
    """
    tensors = named_tensors(read_content(weights.file)[1])
    check_values(tensors, weights.file)
    first: Exception | None = None
    for heads in _heads(weights):
        kept = {name: value for name, value in tensors.items() if not name.startswith(heads)}
        # With the network's own number of classes, timm requires exactly all tensors.
        overlay = {"state_dict": kept, "num_classes": 0, "source": None}
        try:
            network = weights.create(
                images.img_size,
                pretrained=True,
                pretrained_cfg=weights.config,
                pretrained_cfg_overlay=overlay,
            )
        except Exception as error:  # timm raises many types
            first = first or error
            continue
        network.pretrained_cfg.pop("state_dict", None)  # it would keep all weights twice
        return ForeignEncoder(network, images, weights)
    height, width = images.img_size
    reason = _short(first or ValueError("no head"))
    raise InputError(f"{weights.file} does not fit {weights.name} at {height}x{width} px: {reason}")


def _heads(weights: ForeignWeights) -> list[tuple[str, ...]]:
    """Lists prefixes of the head's tensors, in order of trial: its last layer, then the module around it."""
    named = weights.config.classifier or ()
    layers = (named,) if isinstance(named, str) else tuple(named)
    around = [layer.rpartition(".")[0] or layer for layer in layers]
    return list(dict.fromkeys(tuple(f"{name}." for name in names) for names in (layers, around)))
