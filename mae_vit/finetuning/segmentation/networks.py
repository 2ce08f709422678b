"""From images to a feature map, and from a feature map to the classes of pixels.

Shapes: B batch, C channels, H W pixels, D width of the map, h w its rows and columns, K classes.
"""

from __future__ import annotations

import timm
import torch
import torch.nn.functional as F
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from mae_vit.config.encoders import NetworkSection
from mae_vit.core.messages import error_reason
from mae_vit.models.encoders.base import Encoder, as_map
from mae_vit.models.encoders.baselines import build_network
from mae_vit.models.sizes import TIMM_PREFIX

# Width of the light head, as a share of the map's, and its smallest.
_HEAD_SHARE, _HEAD_LEAST = 4, 64
_GROUPS = 8


def patch_map(encoder: Encoder, images: Tensor) -> Tensor:
    """Arranges the patch tokens behind the final norm as a map: (B, C, H, W) -> (B, D, h, w)."""
    return as_map(encoder, encoder.forward_features(images))


class TokenMap(nn.Module):
    """A Vision Transformer of timm's as a network with a feature map."""

    def __init__(self, network: VisionTransformer) -> None:
        """Takes a network; its head is left out."""
        super().__init__()
        network.reset_classifier(0)
        network.fc_norm = nn.Identity()
        self.network = network

    def forward(self, images: Tensor) -> Tensor:
        """Computes (B, C, H, W) -> (B, D, h, w)."""
        tokens = self.network.forward_features(images)[:, self.network.num_prefix_tokens :]
        return tokens.transpose(1, 2).unflatten(2, self.network.patch_embed.grid_size)


class LastMap(nn.Module):
    """The last map of a network that gives a list of them."""

    def __init__(self, network: nn.Module) -> None:
        """Takes a network of timm's `features_only`."""
        super().__init__()
        self.network = network

    def forward(self, images: Tensor) -> Tensor:
        """Computes (B, C, H, W) -> (B, D, h, w)."""
        last: Tensor = self.network(images)[-1]
        return last


class WithoutHead(nn.Module):
    """A residual network of timm's without pooling and head."""

    def __init__(self, network: nn.Module) -> None:
        """Takes a network with `forward_features`."""
        super().__init__()
        network.reset_classifier(0, "")  # type: ignore[operator]
        self.network = network

    def forward(self, images: Tensor) -> Tensor:
        """Computes (B, C, H, W) -> (B, D, h, w)."""
        features: Tensor = self.network.forward_features(images)  # type: ignore[operator]
        return features


def build_map_network(model: NetworkSection) -> nn.Module:
    """Builds a baseline or a timm architecture with fresh weights, without its head: (B, C, H, W) -> (B, D, h, w).

    Raises:
        ValueError: if it has no feature map.
    """
    name = model.name
    if not name.startswith(TIMM_PREFIX):
        network = build_network(
            name,
            num_classes=2,
            in_chans=model.channels,
            img_size=model.image_hw,
            drop_path_rate=model.drop_path_rate,
        )
        if isinstance(network, nn.Sequential):
            # Behind the map: global average, flattening, one layer.
            return nn.Sequential(*list(network)[:-3])
        return TokenMap(network) if isinstance(network, VisionTransformer) else WithoutHead(network)
    try:
        network = timm.create_model(
            name.removeprefix(TIMM_PREFIX),
            features_only=True,
            out_indices=(-1,),
            in_chans=model.channels,
            # Not all networks take it.
            **({"drop_path_rate": model.drop_path_rate} if model.drop_path_rate else {}),
        )
    except Exception as error:  # timm raises many types
        raise ValueError(f"{name} has no feature map: {error_reason(error)[:160]}") from None
    return LastMap(network)


@torch.no_grad()
def map_width(network: nn.Module, model: NetworkSection) -> int:
    """Returns D of a network's map, by one pass of a black image.

    Raises:
        ValueError: if it gives no map of such an image.
    """
    network.eval()
    try:
        shape = network(torch.zeros(1, model.channels, *model.image_hw)).shape
    except (RuntimeError, AssertionError, ValueError) as error:
        size = f"{model.channels} x {model.image_hw[0]} x {model.image_hw[1]}"
        raise ValueError(f"{model.name} does not take {size} images: {error}") from None
    network.train()
    if len(shape) != 4:
        raise ValueError(f"{model.name} has no feature map: its output has the shape {tuple(shape)}")
    return int(shape[1])


class LinearHead(nn.Module):
    """A norm over the batch without affine parameters, and one linear layer for each token (as MAE's linear probe)."""

    def __init__(self, width: int, num_classes: int) -> None:
        """Maps (B, D, h, w) -> (B, K, h, w)."""
        super().__init__()
        self.norm = nn.BatchNorm2d(width, affine=False, eps=1e-6)
        self.classifier = nn.Conv2d(width, num_classes, 1)
        for parameter in self.classifier.parameters():
            nn.init.zeros_(parameter)

    def forward(self, features: Tensor) -> Tensor:
        """Computes (B, D, h, w) -> (B, K, h, w)."""
        logits: Tensor = self.classifier(self.norm(features))
        return logits


class LightHead(nn.Module):
    """Two steps of a 3x3 convolution, group norm, GELU and twofold upsampling; then a 1x1 convolution.

    A head of progressive upsampling (SETR-PUP, arXiv 2012.15840, Sec. 3.3), narrower and of two steps.
    """

    def __init__(self, width: int, num_classes: int) -> None:
        """Maps (B, D, h, w) -> (B, K, 4h, 4w)."""
        super().__init__()
        inner = max(_HEAD_LEAST, width // _HEAD_SHARE // _GROUPS * _GROUPS)
        self.steps = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(before, inner, 3, padding=1, bias=False), nn.GroupNorm(_GROUPS, inner), nn.GELU()
            )
            for before in (width, inner)
        )
        self.classifier = nn.Conv2d(inner, num_classes, 1)

    def forward(self, features: Tensor) -> Tensor:
        """Computes (B, D, h, w) -> (B, K, 4h, 4w)."""
        for step in self.steps:
            features = F.interpolate(step(features), scale_factor=2, mode="bilinear", align_corners=False)
        logits: Tensor = self.classifier(features)
        return logits
