"""timm's backbones with third-party weights, unchanged and with their own pooling.

Shapes: B batch, C channels, H W pixels, D width of a feature, D_map width of a patch's token.
"""

from __future__ import annotations

from typing import Any

import timm
import torch
from torch import Tensor, nn

from mae_vit.core.errors import InputError
from mae_vit.weights.containers import read_content
from mae_vit.weights.feature_encoder import FeatureEncoder, ImageInput
from mae_vit.weights.foreign import ForeignWeights, short_reason
from mae_vit.weights.names import FOREIGN_ORIGIN
from mae_vit.weights.unwrap import check_values, named_tensors

# Arguments of timm's `create_model` that this module sets.
_GIVEN = ("num_classes", "pretrained", "pretrained_cfg", "pretrained_cfg_overlay")


class ForeignEncoder(FeatureEncoder):
    """A backbone of timm with its own pooling.

    Attributes:
        network: timm's model without a head, in evaluation mode.
        weights: source of the weights.
    """

    origin = FOREIGN_ORIGIN
    network: Any

    def __init__(self, network: Any, images: ImageInput, weights: ForeignWeights) -> None:
        """Wraps a model whose weights are already loaded, and encodes a black image as a check.

        Raises:
            InputError: if the network does not take such images, or gives no vector.
        """
        super().__init__(images)
        self.network, self.weights = network, weights
        self.num_prefix_tokens = int(getattr(network, "num_prefix_tokens", 0))
        self.eval().requires_grad_(False)
        height, width = images.img_size
        if images.img_size != weights.images.img_size:
            self._check_patches(images.img_size)
        try:
            _, self.num_features = self.features(torch.zeros(1, images.in_chans, height, width)).shape
        except (RuntimeError, AssertionError, ValueError) as error:
            reason = short_reason(error)
            raise InputError(
                f"{weights.name} does not take images of {height}x{width} px: {reason}"
            ) from None

    def _check_patches(self, img_size: tuple[int, int]) -> None:
        """Rejects sizes with an incomplete last patch, which some of timm's networks silently drop."""
        patch_size = getattr(getattr(self.network, "patch_embed", None), "patch_size", None) or (1, 1)
        sides = (patch_size, patch_size) if isinstance(patch_size, int) else patch_size
        if any(side % patch for side, patch in zip(img_size, sides, strict=True)):
            raise InputError(
                f"{self.weights.name} does not take images of {img_size[0]}x{img_size[1]} px: its patches have "
                f"{sides[0]}x{sides[1]} px"
            )

    def features(self, images: Tensor) -> Tensor:
        """Encodes and pools normalized images as timm does: (B, C, H, W) -> (B, D)."""
        return self.network(images)

    def patch_map(self, images: Tensor) -> Tensor:
        """Returns the last feature map, normed: (B, C, H, W) -> (B, D_map, rows, columns).

        Raises:
            InputError: if timm gives none for this network.
        """
        if not hasattr(self.network, "forward_intermediates"):
            raise InputError(f"timm gives no map of features for {self.weights.name}")
        try:
            maps: Tensor = self.network.forward_intermediates(
                images, indices=1, norm=True, output_fmt="NCHW", intermediates_only=True
            )[-1]
        except AssertionError as error:  # for example Hiera, which cannot norm its maps
            raise InputError(f"timm gives no map of features for {self.weights.name}: {error}") from None
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
            "img_size": list(self.input.img_size),
            "embed_dim": self.num_features,
            "mean": list(self.input.mean),
            "std": list(self.input.std),
            "interpolation": self.input.interpolation,
        }


def open_foreign(weights: ForeignWeights, images: ImageInput) -> ForeignEncoder:
    """Builds the network for images of a size, and loads all weights except the head.

    Raises:
        InputError: if the weights do not match the network, or it does not take such a size.
    """
    tensors = named_tensors(read_content(weights.file)[1])
    check_values(tensors, weights.file)
    network = _load(weights, tensors, images.img_size)
    network.pretrained_cfg.pop("state_dict", None)  # it would keep all weights twice
    return ForeignEncoder(network, images, weights)


def open_untrained(weights: ForeignWeights, images: ImageInput) -> ForeignEncoder:
    """Builds the same network with timm's random weights, drawn by torch's generator."""
    options = _options(weights, images.img_size)
    network = timm.create_model(weights.architecture, pretrained=False, num_classes=0, **options)
    return ForeignEncoder(network, images, weights)


def _options(weights: ForeignWeights, img_size: tuple[int, int]) -> dict[str, Any]:
    options = {name: value for name, value in weights.arguments.items() if name not in _GIVEN}
    return options | ({"img_size": img_size} if weights.config.fixed_input_size else {})


def _load(weights: ForeignWeights, tensors: dict[str, Tensor], img_size: tuple[int, int]) -> Any:
    options = _options(weights, img_size)
    first: Exception | None = None
    for heads in _heads(weights):
        kept = {name: value for name, value in tensors.items() if not name.startswith(heads)}
        try:
            return timm.create_model(
                weights.architecture,
                pretrained=True,
                pretrained_cfg=weights.config,
                # With the network's own number of classes, timm requires exactly all tensors.
                pretrained_cfg_overlay={"state_dict": kept, "num_classes": 0, "source": None},
                num_classes=0,
                **options,
            )
        except Exception as error:  # timm raises many types
            first = first or error
    height, width = img_size
    reason = short_reason(first or ValueError("no head"))
    raise InputError(
        f"{weights.file} does not fit {weights.name} for images of {height}x{width} px: {reason}"
    )


def _heads(weights: ForeignWeights) -> list[tuple[str, ...]]:
    """Lists prefixes of the head's tensors, in order of trial: its last layer, then the module around it."""
    named = weights.config.classifier or ()
    layers = (named,) if isinstance(named, str) else tuple(named)
    around = [layer.rpartition(".")[0] or layer for layer in layers]
    return list(dict.fromkeys(tuple(f"{name}." for name in names) for names in (layers, around)))
