"""Networks of timm that our encoders cannot be, such as DINOv2 and ConvNeXt: timm builds them and loads their weights.

Shapes: B batch, C channels, H W pixels, D width of a feature, D_map width of a patch's token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import timm
import torch
from timm.data import resolve_data_config
from timm.models import PretrainedCfg, clean_state_dict, get_pretrained_cfg
from torch import Tensor

from mae_vit.core.errors import InputError
from mae_vit.core.messages import closest, nearest
from mae_vit.core.user_files import expand_path
from mae_vit.data.images.augment import Interpolation
from mae_vit.models.encoders.network import last_map
from mae_vit.models.sizes import TIMM_PREFIX
from mae_vit.weights.facts import config_beside, is_ours
from mae_vit.weights.feature_encoder import FeatureEncoder, ImageInput
from mae_vit.weights.names import FOREIGN_ORIGIN, split_timm
from mae_vit.weights.unwrap import named_tensors

if TYPE_CHECKING:
    from mae_vit.weights.read import Weights

_LONGEST_REASON = 200
_IN_CHECKPOINTS = ("state_dict_ema", "model_ema", "state_dict", "model")
# Arguments of timm's `create_model` that this module sets.
_GIVEN = ("num_classes", "pretrained", "pretrained_cfg", "pretrained_cfg_overlay")


@dataclass(frozen=True)
class TimmNetwork:
    """One of timm's networks, with timm's facts about its weights.

    Attributes:
        architecture: timm's name, without the tag of the weights.
        config: timm's config of the weights.
        arguments: more arguments of `timm.create_model`.
    """

    architecture: str
    config: PretrainedCfg
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The network as in `model.name`."""
        return TIMM_PREFIX + self.architecture

    @cached_property
    def model(self) -> Any:
        """The network without values, on the meta device; raises InputError if timm cannot build it."""
        try:
            with torch.device("meta"):
                return self._create(num_classes=0)
        except Exception as error:  # timm raises many types
            given = ", ".join(f"{name}={value!r}" for name, value in self.arguments.items())
            hint = f" with {given}, as its config.json says" * bool(given)
            raise InputError(f"timm cannot build {self.name}{hint} ({_short(error)})") from None

    @property
    def pool(self) -> str:
        """Timm's name for its pooling; "timm's" for one without a name."""
        pool = getattr(self.model, "global_pool", None)
        return pool if isinstance(pool, str) else "timm's"

    @cached_property
    def images(self) -> ImageInput:
        """The images of its training; raises InputError if timm's config is not supported."""
        try:
            data = resolve_data_config(pretrained_cfg=self.config.to_dict())
            channels, height, width = (int(side) for side in data["input_size"])
            mean, std = (tuple(float(value) for value in data[name]) for name in ("mean", "std"))
            interpolation = data["interpolation"]
            if channels != 3 or len(mean) != 3 or len(std) != 3 or min(height, width, *std) <= 0:
                raise ValueError(f"images of {channels} channels")
            if interpolation not in get_args(Interpolation):
                raise ValueError(f"interpolation {interpolation!r}")
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(f"the data config of {self.name} is not supported ({_short(error)})") from None
        return ImageInput((height, width), channels, mean, std, interpolation)

    def _create(self, **options: Any) -> Any:
        """Builds it by `timm.create_model`."""
        return timm.create_model(self.architecture, **{**self.arguments, **options})

    def build(
        self,
        img_size: tuple[int, int],
        in_chans: int,
        tensors: Mapping[str, Tensor] | None = None,
        source: str = "",
    ) -> Any:
        """Builds it without a head, for images of a size; timm fits the `tensors` of `source` to it, except the head's.

        Raises InputError if they do not match, or it does not take such images.
        """
        options: dict[str, Any] = {"num_classes": 0, "in_chans": in_chans}
        if self.config.fixed_input_size:
            options["img_size"] = img_size
        first: Exception | None = None
        for heads in self._heads() if tensors is not None else [()]:
            if tensors is not None:
                kept = {name: value for name, value in tensors.items() if not name.startswith(heads)}
                # With the network's own number of classes, timm requires exactly all tensors.
                overlay = {"state_dict": kept, "num_classes": 0, "source": None}
                options |= {
                    "pretrained": True,
                    "pretrained_cfg": self.config,
                    "pretrained_cfg_overlay": overlay,
                }
            try:
                network = self._create(**options)
            except Exception as error:  # timm raises many types
                first = first or error
                continue
            network.pretrained_cfg.pop("state_dict", None)  # it would keep all weights twice
            self._check_size(network, img_size)
            return network
        height, width = img_size
        reason = _short(first or ValueError("no head"))
        raise InputError(f"{source or self.name} does not fit {self.name} at {height}x{width} px: {reason}")

    def _check_size(self, network: Any, img_size: tuple[int, int]) -> None:
        """Raises InputError for an incomplete last patch, which some of timm's networks silently drop."""
        patch = getattr(getattr(network, "patch_embed", None), "patch_size", None) or 1
        sides = (patch, patch) if isinstance(patch, int) else patch
        if img_size != self.images.img_size and any(
            n % side for n, side in zip(img_size, sides, strict=True)
        ):
            size, patches = ("x".join(map(str, pair)) for pair in (img_size, sides))
            raise InputError(
                f"{self.name} does not accept images of {size} px; its patches have {patches} px"
            )

    def fit(
        self, tensors: Mapping[str, Tensor], source: str, img_size: tuple[int, int], in_chans: int
    ) -> dict[str, Tensor]:
        """Returns the tensors of `source` for training on images of a size; see `Weights.fitted`."""
        if own := sorted({*self.arguments} - {"img_size"}):
            raise InputError(
                f"{source} is {self.name} with other {', '.join(own)} (its config.json), which is not trained here; "
                "measure it by finetune.mode=knn or linear_probe"
            )
        return self.build(img_size, in_chans, tensors, source).state_dict()

    def _heads(self) -> list[tuple[str, ...]]:
        """Lists prefixes of the head's tensors, in order of trial: its last layer, then the module around it."""
        named = self.config.classifier or ()
        layers = (named,) if isinstance(named, str) else tuple(named)
        around = [layer.rpartition(".")[0] or layer for layer in layers]
        return list(dict.fromkeys(tuple(f"{name}." for name in names) for names in (layers, around)))


def find_timm(name: str) -> TimmNetwork:
    """Finds a network of timm by its name, with or without the tag of its weights; raises InputError if it has none."""
    architecture, _, tag = name.partition(".")
    if not timm.is_model(architecture):
        raise InputError(f"timm has no network {architecture!r}; {nearest_timm(architecture)}")
    config = _find_config(name)
    if config is None and tag:
        known = timm.list_pretrained(f"{architecture}.*")
        raise InputError(f"timm has no weights {name!r}; {nearest(name, known)}")
    return TimmNetwork(architecture, config or PretrainedCfg())


def find_beside(path: Path) -> TimmNetwork | None:
    """Finds the network that timm's `config.json` beside a file of weights describes; None without one."""
    content = config_beside(path)
    architecture, facts = content.get("architecture"), content.get("pretrained_cfg") or {}
    arguments = content.get("model_args") or {}
    if not (isinstance(architecture, str) and isinstance(facts, dict) and isinstance(arguments, dict)):
        return None
    if not timm.is_model(architecture):
        return None
    known = {item.name for item in fields(PretrainedCfg)} - {"url", "file", "hf_hub_id", "source"}
    stated = {key: value for key, value in facts.items() if key in known}
    config = replace(_find_config(architecture) or PretrainedCfg(), **stated)
    arguments = {name: value for name, value in arguments.items() if name not in _GIVEN}
    network = TimmNetwork(architecture, config, arguments)
    # timm writes these two even if they change nothing.
    usual = replace(
        network, arguments={key: arguments[key] for key in arguments.keys() - {"in_chans", "global_pool"}}
    )
    same = repr(network.model) == repr(usual.model) and network.pool == usual.pool
    return usual if same else network


@lru_cache
def is_of_timm(name: str) -> bool:
    """Returns whether weights are of a network that ours cannot be, by their name, or by the config beside them."""
    if name.startswith(TIMM_PREFIX):
        network: TimmNetwork | None = find_timm(split_timm(name)[0])
    else:
        path = expand_path(name)
        network = find_beside(path / "model.safetensors" if path.is_dir() else path)
    return network is not None and not is_ours(network.model)


def unwrapped(content: Mapping[Any, Any]) -> dict[str, Tensor]:
    """Returns the network's tensors in a checkpoint as timm's training and its authors write them, averages first."""
    kept = (
        named_tensors(content[name]) for name in _IN_CHECKPOINTS if isinstance(content.get(name), Mapping)
    )
    tensors: dict[str, Tensor] = clean_state_dict(next(filter(None, kept), None) or named_tensors(content))
    return tensors


def _find_config(name: str) -> PretrainedCfg | None:
    """Returns timm's config of weights; None if it has none of that name."""
    try:
        return get_pretrained_cfg(name)
    except RuntimeError:
        return None


def nearest_timm(name: str) -> str:
    """Returns a hint at timm's name nearest to an unknown one."""
    known = timm.list_models()
    return closest(name, known) or f"it has {len(known)}, such as vit_base_patch16_224"


def _short(error: Exception) -> str:
    """Returns an error's message as one line."""
    text = " ".join(str(error).split()) or type(error).__name__
    text = f"it lacks {text}" if isinstance(error, KeyError) else text
    return text if len(text) <= _LONGEST_REASON else f"{text[:_LONGEST_REASON]}..."


class TimmEncoder(FeatureEncoder):
    """A network of timm without a head, with its own pooling, in evaluation mode."""

    origin = FOREIGN_ORIGIN
    network: Any

    def __init__(self, weights: Weights, images: ImageInput, *, random: bool = False) -> None:
        """Builds the network for these images, with its weights or `random` ones, and encodes a black image as a check.

        Raises InputError if the weights do not match it, it does not take such images, or gives no vector.
        """
        super().__init__(images)
        assert weights.network is not None
        kind, tensors = weights.network, None if random else weights.tensors
        # The network has a copy of the tensors.
        self._digest, self.weights = weights.digest, replace(weights, tensors={})
        self.network = kind.build(images.img_size, images.in_chans, tensors, weights.source)
        self.eval().requires_grad_(False)
        height, width = images.img_size
        try:
            _, self.num_features = self.features(torch.zeros(1, images.in_chans, height, width)).shape
        except (RuntimeError, AssertionError, ValueError) as error:
            asked = "; leave img_size out" if images.img_size != kind.images.img_size else ""
            size = f"images of {height}x{width} px"
            raise InputError(f"{kind.name} does not accept {size} ({_short(error)}){asked}") from None

    def features(self, images: Tensor) -> Tensor:
        """Encodes and pools normalized images as timm does: (B, C, H, W) -> (B, D)."""
        return self.network(images)

    def patch_map(self, images: Tensor) -> Tensor:
        """Returns the last feature map, normed: (B, C, H, W) -> (B, D_map, rows, columns).

        Raises InputError if timm gives none for this network.
        """
        try:
            return last_map(self.network, images)
        except ValueError as error:
            raise InputError(f"{self.weights.source}: {error}") from None

    def description(self) -> dict[str, Any]:
        """Returns the facts, as JSON, that determine the features: source, digest, sizes, normalization."""
        assert self.weights.network is not None
        return {
            "start": self.weights.source,
            "digest": self._digest,
            "origin": self.origin,
            "network": self.weights.network.name,
            "pool": self.weights.network.pool,
            **super().description(),
            "interpolation": self.input.interpolation,
        }
